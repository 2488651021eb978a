"""Planner: searches parallel sizes, placement, schedule, microbatches, partition and recomputation.

    result = search(cost_model, SearchSpace(tensor=(1, 2, 4, 8)))
    result.best.run, result.best.partition, result.best.step_s
    result.runners_up[0].reason        # "1.12x slower: ..."

How: every candidate gets a lower bound of its step (all work on all devices, and its reductions), in the order of
which it is looked at: its layers are assigned, its memory checked, its step estimated by a closed form. Candidates
whose bound is above the best estimates are never looked at. The best few are simulated, and the fastest of them wins;
between plans within _NEARLY of each other the one with the simpler set-up does (no recomputation, fewer
chunks, smaller tensor and pipeline sizes). The winner's layers are moved where that makes it faster still (refining.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.compute_order import INTERLEAVED, SPLITTING
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.layer_cost import ModelCost, check_count
from lightning_holmes.plan.not_fitting import BY_HAND, WITH_STATES, Lack, lack_of, nothing_fits, without_states
from lightning_holmes.plan.partition import PARTITION_NAMES, Partition, make_partition
from lightning_holmes.plan.prediction import Prediction, fits, predict
from lightning_holmes.plan.refining import refine
from lightning_holmes.plan.run_shape import Across, Layout, RunShape
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.stage_ranks import V_SHAPED, rank_of_stage, ranks_of_stages

_SIMULATED = 8  # candidates that are run through the simulator
_NEARLY = 0.002
_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What the search may choose from. None: whatever fits.

    tensor: sizes to try; others than 1 need a module that calls parallelize_module. num_microbatches and
    microbatch_samples: by default every power of two of samples that divides a replica's batch, up to 64.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] = (1,)
    across: tuple[Across, ...] = ("pipeline", "data")
    schedules: tuple[str, ...] = ("1f1b", "eager_1f1b", "interleaved_1f1b", "eager_interleaved_1f1b", "gpipe")
    num_chunks: tuple[int, ...] = (2, 3, 4)
    num_microbatches: tuple[int, ...] | None = None
    recomputation: tuple[bool, ...] = (False, True)
    partition: str | tuple[int, ...] = "self_adapting"
    runners_up: int = 5

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "num_chunks", "num_microbatches"):
            for value in getattr(self, name) or ():
                check_count(value, name)
        if isinstance(self.partition, str) and self.partition not in PARTITION_NAMES:
            known = ", ".join(f'"{name}"' for name in PARTITION_NAMES)
            raise ConfigurationError(f"partition={self.partition!r} is not known; write one of {known} or layer counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan and the ones after it. left_out: why candidates were not looked at, and how many.

    memory_note: what the plans lack, and with which optimizer; None where they fit with one like AdamW.
    """

    best: Prediction
    runners_up: tuple[Prediction, ...]
    num_candidates: int
    left_out: dict[str, int]
    memory_note: str | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    run: RunShape
    bound_s: float


@dataclass(slots=True)
class _Looked:
    run: RunShape
    partition: Partition
    estimate_s: float


def search(cost_model: CostModel, space: SearchSpace | None = None) -> SearchResult:
    """The fastest plan that fits; as in a run (choice.py) also where only an optimizer with fewer states than AdamW's does,
    and with layers that are given by hand where nothing fits. The result's memory_note says so.

    Raises:
        ConfigurationError: nothing can run: no sizes go together, or nothing fits the memory; then it says by
            how much and what would make it fit.
    """
    space = space or SearchSpace()
    try:
        return _search(cost_model, space)
    except NothingFitsError as error:
        reason = error
    if not isinstance(space.partition, str):
        found = _search(cost_model, space, limit_memory=False)
        return replace(found, memory_note=f"{BY_HAND}{reason}")
    return replace(search(without_states(cost_model, reason), space), memory_note=f"{WITH_STATES}{reason}")


def _search(cost_model: CostModel, space: SearchSpace, *, limit_memory: bool = True) -> SearchResult:
    left_out: Counter[str] = Counter()
    candidates = sorted(_candidates(cost_model, space, left_out), key=lambda entry: entry.bound_s)
    if not candidates:
        raise _nothing_to_try(cost_model, space, left_out)
    wanted = _SIMULATED + space.runners_up
    looked: list[_Looked] = []
    lacking: list[Lack] = []
    for index, candidate in enumerate(candidates):
        if len(looked) >= wanted and candidate.bound_s > looked[wanted - 1].estimate_s:
            left_out["cannot be faster than the plans listed, by its lower bound"] += len(candidates) - index
            break
        try:
            partition = _fill_buckets(cost_model, candidate.run, space.partition, limit_memory=limit_memory)
        except NothingFitsError as error:
            left_out["does not fit the memory"] += 1
            lacking.append(Lack(run=candidate.run, excess_bytes=error.excess_bytes, rank=error.rank))
            continue
        except ConfigurationError:
            left_out["no partition of the layers"] += 1
            continue
        looked.append(_Looked(candidate.run, partition, _estimate(cost_model, candidate.run, partition)))
        looked.sort(key=lambda entry: entry.estimate_s)
    made: list[Prediction] = []
    fitting: list[Prediction] = []
    for entry in looked:
        if len(fitting) == wanted:
            break
        made.append(predict(cost_model, entry.run, entry.partition))
        if not limit_memory or fits(made[-1]):
            fitting.append(made[-1])
    if not fitting:
        raise _nothing_fits(cost_model, space, candidates, [*lacking, *map(lack_of, made)])
    if len(fitting) < len(made):
        left_out["does not fit the memory"] += len(made) - len(fitting)
    ranked = sorted(fitting, key=_rank)
    fastest = ranked[0].step_s
    ranked.sort(key=lambda entry: (math.floor((entry.step_s / fastest - 1) / _NEARLY), *_plainness(entry.run)))
    best, others = ranked[0], _unlike(ranked[1:], space.runners_up)
    if space.partition == "self_adapting":
        best = refine(cost_model, best)
    return SearchResult(
        best=replace(best, reason=_why(best, others)),
        runners_up=tuple(replace(entry, reason=_why_not(entry, best)) for entry in others),
        num_candidates=len(candidates),
        left_out=dict(left_out),
    )


# candidates


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _candidates(cost_model: CostModel, space: SearchSpace, left_out: Counter[str]) -> Iterator[_Candidate]:
    devices, layers, batch = cost_model.num_devices, cost_model.model.num_layers, cost_model.training.batch_samples
    smallest_host = math.gcd(*(host.devices for host in cost_model.network.hosts))
    several = len(cost_model.network.topology.clusters) > 1
    for pipeline in space.pipeline or _divisors(devices):
        for tensor in space.tensor:
            if devices % (pipeline * tensor):
                left_out[f"pipeline x tensor does not divide {devices} devices"] += 1
                continue
            if smallest_host % tensor:
                left_out["tensor-parallel groups would leave a host"] += 1
                continue
            if pipeline > layers:
                left_out["more pipeline ranks than layers"] += 1
                continue
            data = devices // (pipeline * tensor)
            if batch % data:
                left_out[f"the batch of {batch} does not divide among the replicas"] += 1
                continue
            for across in space.across if several and pipeline > 1 and data > 1 else space.across[:1]:
                layout = Layout(pipeline=pipeline, tensor=tensor, data=data, across=across)
                for run in _runs(layout, batch // data, layers, space):
                    yield _Candidate(run, _lower_bound(cost_model, run))


def _runs(layout: Layout, samples: int, layers: int, space: SearchSpace) -> Iterator[RunShape]:
    counts = space.num_microbatches or [samples >> power for power in range(7) if samples % (1 << power) == 0]
    schedules: list[tuple[str, int]] = []
    for name in space.schedules:
        if name in INTERLEAVED:
            schedules += [(name, chunks) for chunks in space.num_chunks if chunks > 1]
        elif name in V_SHAPED:
            schedules.append((name, 2))
        elif layout.pipeline > 1 or name == space.schedules[0] or len(space.schedules) == 1:
            schedules.append((name, 1))
    for count in counts:
        if count < 1 or samples % count:
            continue
        for name, chunks in schedules:
            if chunks > 1 and (layout.pipeline == 1 or layout.pipeline * chunks > layers or count < layout.pipeline):
                continue
            for recomputation in space.recomputation:
                if recomputation and name in SPLITTING:
                    continue  # refused by the runner
                yield RunShape(
                    layout=layout,
                    schedule=name,
                    num_microbatches=count,
                    microbatch_samples=samples // count,
                    num_chunks=chunks,
                    recomputation=recomputation,
                )


def _total_work(model: ModelCost) -> float:
    return model.forward + model.backward


def _lower_bound(cost_model: CostModel, run: RunShape) -> float:
    """No step of this shape is faster: all work spread over all devices, without a bubble or a wait."""
    model = cost_model.microbatch_model(run.microbatch_samples, run.recomputation)
    return run.num_microbatches * _total_work(model) / sum(cost_model.speeds(run.layout))


def _fill_buckets(
    cost_model: CostModel, run: RunShape, rule: str | tuple[int, ...], *, limit_memory: bool
) -> Partition:
    stages = run.layout.pipeline * run.num_chunks
    layers = cost_model.model.num_layers
    balance = cost_model.balance(run, limit_memory=limit_memory)
    by_rank = cost_model.speeds(run.layout)
    speeds = [
        by_rank[rank_of_stage(run.schedule, stage, pipeline_parallel_size=run.layout.pipeline)]
        for stage in range(stages)
    ]
    partition = make_partition(rule, layers, stages, speeds=speeds, balance=balance)
    if rule != "self_adapting" and balance.limits is not None:
        used = balance.memory(partition.layer_counts)
        excess, rank = max(
            (mine - limit, rank) for rank, (mine, limit) in enumerate(zip(used, balance.limits, strict=True))
        )
        if excess > 0:
            raise NothingFitsError(
                f"partition {list(partition.layer_counts)} passes the memory limit of pipeline rank {rank} by "
                f"{excess / _GIB:.2f} GiB",
                excess_bytes=excess,
                rank=rank,
            )
    return partition


def _estimate(cost_model: CostModel, run: RunShape, partition: Partition) -> float:
    """A step by closed form: the slowest rank or card for all microbatches, filling and draining, reductions."""
    costs = cost_model.step_costs(run, partition)
    ranks, stages, chunks = run.layout.pipeline, partition.num_stages, run.num_chunks
    both = [forward + backward for forward, backward in zip(costs.forward_s, costs.backward_s, strict=True)]
    where = ranks_of_stages(run.schedule, pipeline_parallel_size=ranks, num_chunks=chunks)
    loads, reductions = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(where):
        loads[rank] += both[stage]
        reductions[rank] += costs.reduce_s[stage] if costs.reduce_s else 0.0
    cards: Counter[str] = Counter()
    transfers = [0.0] * stages
    for stage in range(stages - 1):
        source, target = where[stage], where[stage + 1]
        for pair in ((source, target), (target, source)) if source != target else ():
            route = costs.routes[pair]
            seconds = [costs.activation_bytes[stage] * per_byte for _, per_byte in route.hops]
            transfers[stage] += max(seconds) + route.latency_s
            for (card, _), taken in zip(route.hops, seconds, strict=True):
                cards[card] += taken  # type: ignore[assignment]
    slowest = max([*loads, *cards.values()])
    # the first microbatch passes the first stage of every rank alone, and the last one comes back alone
    fill = sum(both[:ranks]) - max(both[:ranks]) if chunks == 1 else sum(both) / stages * (ranks - 1)
    fill += sum(transfers[: ranks - 1])
    end = max(
        (0.0 if costs.overlap_reduce else reductions[rank]) + costs.update_s[rank] + costs.gather_s[rank]
        for rank in range(ranks)
    )
    return run.num_microbatches * slowest + fill + end


# the choice and its reasons


def _rank(entry: Prediction) -> float:
    return entry.step_s


def _plainness(run: RunShape) -> tuple[Any, ...]:
    return run.recomputation, run.num_chunks, run.layout.tensor, run.layout.pipeline, run.schedule != "1f1b"


def _unlike(ranked: Sequence[Prediction], number: int) -> list[Prediction]:
    """The next best, at most two of one layout: a list of one layout's microbatch counts would tell little."""
    found: list[Prediction] = []
    seen: Counter[Layout] = Counter()
    for entry in ranked:
        if seen[entry.run.layout] < 2 and len(found) < number:
            seen[entry.run.layout] += 1
            found.append(entry)
    return found


def _where_time_goes(entry: Prediction) -> dict[str, float]:
    """Seconds of the step by cause, as the mean over pipeline ranks."""
    timeline, ranks = entry.timeline, entry.run.layout.pipeline
    update = math.fsum(entry.costs.update_s) / ranks
    tensor = timeline.exposed_s.get("tensor_parallel", 0.0) / ranks
    busy = math.fsum(timeline.busy_s(rank) for rank in range(ranks)) / ranks
    return {
        "computing": busy - tensor - update,
        "bubble": timeline.bubble_share * timeline.step_s,
        "waiting for transfers between stages": timeline.exposed_s["pipeline"] / ranks,
        "reducing gradients": timeline.exposed_s["data_parallel"] / ranks,
        "tensor-parallel transfers": tensor,
        "the optimizer's step": update,
    }


def _why(best: Prediction, others: Sequence[Prediction]) -> str:
    parts = sorted(_where_time_goes(best).items(), key=lambda entry: -entry[1])
    shown = ", ".join(f"{seconds / best.step_s:.0%} {what}" for what, seconds in parts if seconds >= 0.01 * best.step_s)
    ahead = f"; the next one takes {others[0].step_s / best.step_s:.2f}x as long" if others else ""
    return f"the fastest{' that fits' if fits(best) else ''}: {shown}{ahead}"


def _why_not(entry: Prediction, best: Prediction) -> str:
    mine, theirs = _where_time_goes(entry), _where_time_goes(best)
    more = sorted(((mine[what] - theirs[what], what) for what in mine), reverse=True)
    named = [f"{seconds:.3g} s more {what}" for seconds, what in more[:2] if seconds > 0.005 * best.step_s]
    cause = ": " + " and ".join(named) if named else ""
    ratio = entry.step_s / best.step_s
    return f"{ratio:.2f}x the time{cause}" if ratio > 1 + _NEARLY else f"as fast, but less simple{cause}"


# nothing fits


def _nothing_to_try(cost_model: CostModel, space: SearchSpace, left_out: Counter[str]) -> ConfigurationError:
    reasons = "; ".join(f"{what} ({count} tries)" for what, count in left_out.most_common(3)) or "no sizes to try"
    return ConfigurationError(
        f"no parallel sizes go together on {cost_model.num_devices} devices with a batch of "
        f"{cost_model.training.batch_samples} and {cost_model.model.num_layers} layers: {reasons}; change the batch size, "
        f"or allow other sizes than pipeline={space.pipeline or 'any'}, tensor={space.tensor}"
    )


def _nothing_fits(
    cost_model: CostModel,
    space: SearchSpace,
    candidates: Sequence[_Candidate],
    lacks: Sequence[Lack],
) -> ConfigurationError:
    if not lacks:
        return ConfigurationError(
            f"no partition={space.partition!r} of the {cost_model.model.num_layers} layers goes with any of "
            f'{len(candidates)} plans; use partition="self_adapting"'
        )
    runs = [candidate.run for candidate in candidates]
    return nothing_fits(cost_model, runs, lacks=lacks, recomputation=space.recomputation)
