"""The search: assigns layers to the candidates and simulates them; the fastest that fits is taken, and its partition refined.

    result = search(cost_model, SearchSpace(tensor=(1, 2, 4, 8)))
    result.best.run, result.best.partition, result.best.step_s
    result.runners_up[0].reason        # "1.12x slower: ..."

If several layouts are possible, they are evaluated in the order of a lower bound of their step: layers are
assigned, memory is checked, and the step is estimated by a closed form. Candidates are simulated in the order of their estimates
until the estimates exceed the fastest step found, but at least a few; layouts whose bound exceeds it are never evaluated. For the
fastest layouts, or for a fixed layout, every candidate is simulated, and prefer() chooses one: thus a run, whose layout is
fixed, and the plan command choose the same. Of layouts within _NEARLY of each other the simpler one is taken.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition
from lightning_holmes.plan.prediction import Prediction, fits, predict
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.plan.search.candidates import SearchSpace, SetUp, make_set_ups
from lightning_holmes.plan.search.not_fitting import BY_HAND, WITH_STATES, Lack, lack_of, nothing_fits, without_states
from lightning_holmes.plan.search.refine import refine
from lightning_holmes.plan.self_adapting import NothingFitsError

_SIMULATED = 8  # candidates of all layouts that are simulated at least, in addition to the number of runners-up
_TRIED = 3  # layouts for which every candidate is tried
# stages x microbatches, summed over the candidates of a layout; beyond it the candidates with the slowest estimates are not simulated, once
# _FITTING that fit are found: estimates hardly tell schedules apart
_LARGEST = 2**16
_FITTING = 3
_NEARLY = 0.002
_ALIKE = 0.01  # plans of one layout are compared in steps of this share
# the shares of a step that these must save by prediction, which leaves out some of their costs
MICROBATCH_GAIN = 0.08  # more microbatches
CHUNKS_GAIN = 0.02  # several stages a rank: a step took 0 to 2 % longer than predicted, relative to plans without (docs/log.md, 2026-11-23)
_LAYERED_GAIN = 0.005  # a layered schedule, which holds the activations of all microbatches
_SPLIT_GAIN = 0.05  # split backwards, whose cost depends on the layers
_NO_MEMORY = "does not fit the memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan and the ones after it.

    Attributes:
        runners_up: of several layouts, unless the layout is fixed.
        left_out: the number of candidates that were not evaluated or taken, by reason.
        memory_note: how much memory the plans lack, and with which optimizer; None if they fit with an optimizer like AdamW.
        sharding_note: whether parameters are sharded, and why, if the search decided it (shard_search.py).
        fits_no_optimizer: the best plan, whose layers were given by hand or which had no choices left, does not fit even with an
            optimizer without states.
        unrefined: the best plan before single layers were moved; comparable with ``tried``.
        tried: all simulated plans of the best plan's layout that fit.
    """

    best: Prediction
    runners_up: tuple[Prediction, ...]
    num_candidates: int
    left_out: dict[str, int]
    unrefined: Prediction
    tried: tuple[Prediction, ...]
    memory_note: str | None = None
    sharding_note: str | None = None
    fits_no_optimizer: bool = False


@dataclass(slots=True)
class _Looked:
    set_up: SetUp
    run: RunShape
    partition: Partition
    estimate_s: float


def search(cost_model: CostModel, space: SearchSpace | None = None) -> SearchResult:
    """Find the fastest plan that fits the memory.

    If nothing fits with AdamW: with layers given by hand, or with nothing left to choose, memory is not checked; otherwise the search
    is repeated for an optimizer without states. The result's memory_note says so.

    Raises:
        NothingFitsError: nothing fits even without optimizer states; the message says how much is missing, and what would make it fit.
        ConfigurationError: no parallel sizes are possible, or no partition avoids the forbidden split points.
    """
    space = space or SearchSpace()
    asked = _Search(cost_model, space)
    try:
        return asked.run()
    except NothingFitsError as error:
        reason = error
    if not isinstance(space.partition, str) or space.is_settled:
        found = _Search(cost_model, space, limit_memory=False).run()
        training = replace(cost_model.training, state_ratio=cost_model.training.least_state_ratio)
        bare = predict(cost_model.with_training(training), found.best.run, found.best.partition)
        return replace(found, memory_note=f"{BY_HAND}{reason}", fits_no_optimizer=not fits(bare))
    found = search(without_states(cost_model, reason), space)
    return replace(found, memory_note=f"{WITH_STATES}{reason}")


class _Search:
    def __init__(self, cost_model: CostModel, space: SearchSpace, *, limit_memory: bool = True) -> None:
        self.cost_model, self.space = cost_model, space
        self.limit_memory = limit_memory
        self.left_out: Counter[str] = Counter()
        self.set_ups = make_set_ups(cost_model, space, self.left_out)
        self.lacks: list[Lack] = []
        self.trouble: ConfigurationError | None = None
        self.predict = functools.cache(functools.partial(predict, cost_model))
        self.refined: dict[tuple[RunShape, Partition], Prediction] = {}

    def run(self) -> SearchResult:
        set_ups = self.set_ups
        if not set_ups:
            raise self._nothing_to_try()
        compared = self._compare_layouts() if len(set_ups) > 1 else []
        tried = self._try_fastest(compared) if compared else self._try_all(set_ups[0])
        if not tried:
            raise self._nothing_fits()
        unrefined = prefer(tried)
        best = self._refined(unrefined)
        others = {entry.run: entry for entry in (*(entry for _, entry in compared), *tried) if entry.run != best.run}
        slower = [entry for entry in others.values() if entry.step_s >= best.step_s * (1 - _NEARLY)]
        if len(slower) < len(others):
            what = "faster by prediction, but by less than more microbatches or chunks must save"
            self.left_out[what] += len(others) - len(slower)
        runners_up = _unlike(sorted(slower, key=lambda entry: entry.step_s), self.space.runners_up)
        return SearchResult(
            best=replace(best, reason=_why(best, runners_up)),
            runners_up=tuple(replace(entry, reason=_why_not(entry, best)) for entry in runners_up),
            num_candidates=sum(len(set_up.runs) for set_up in set_ups),
            left_out=dict(self.left_out),
            unrefined=unrefined,
            tried=tuple(tried),
        )

    def _compare_layouts(self) -> list[tuple[SetUp, Prediction]]:
        """Simulate candidates of all layouts in the order of their estimates, until these exceed the fastest step
        found."""
        wanted = _SIMULATED + self.space.runners_up
        made: list[tuple[SetUp, Prediction]] = []
        fastest = math.inf
        waiting = deque(self.set_ups)
        looked: list[tuple[float, int, _Looked]] = []
        order = itertools.count()
        while True:
            while waiting and (not looked or waiting[0].bound_s <= looked[0][0]):
                set_up = waiting.popleft()
                for entry in self._look(set_up, set_up.runs) or self._look(set_up, set_up.smaller):
                    heapq.heappush(looked, (entry.estimate_s, next(order), entry))
            if not looked or (len(made) >= wanted and looked[0][0] > fastest):
                break
            entry = heapq.heappop(looked)[2]
            for found in self._simulate([entry]):
                made.append((entry.set_up, found))
                fastest = min(fastest, found.step_s)
        if waiting:
            left = sum(len(set_up.runs) for set_up in waiting)
            self.left_out["cannot be faster than the plans listed, by its lower bound"] += left
        if not made:
            raise self._nothing_fits()
        return made

    def _try_fastest(self, compared: Sequence[tuple[SetUp, Prediction]]) -> list[Prediction]:
        """Choose a layout; return the predictions of all its candidates. The plan that prefer() picks may be slower than a
        layout's fastest candidate, so every candidate of the best few layouts is tried."""
        best: dict[SetUp, float] = {}
        for set_up, entry in compared:
            best[set_up] = min(entry.step_s, best.get(set_up, math.inf))
        most = min(best.values()) * (1 + MICROBATCH_GAIN)
        near = sorted((set_up for set_up, step_s in best.items() if step_s <= most), key=lambda set_up: best[set_up])
        tried = [found for set_up in near[:_TRIED] if (found := self._try_all(set_up))]
        picked = [self._refined(prefer(found)) for found in tried]
        fastest = min(pick.step_s for pick in picked)

        def rank(pick: Prediction) -> tuple[Any, ...]:
            run, slower = pick.run, math.floor((pick.step_s / fastest - 1) / _NEARLY)
            return slower, run.num_chunks, run.layout.tensor, run.layout.pipeline, run.schedule != "1f1b", pick.step_s

        return tried[picked.index(min(picked, key=rank))]

    def _refined(self, prediction: Prediction) -> Prediction:
        if self.space.partition != "self_adapting":
            return prediction
        key = prediction.run, prediction.partition
        if key not in self.refined:
            self.refined[key] = refine(self.cost_model, prediction)
        return self.refined[key]

    def _try_all(self, set_up: SetUp) -> list[Prediction]:
        """Simulate the candidates of a layout; return those that fit, in the order of the candidates."""
        for runs in (set_up.runs, set_up.smaller):
            looked = self._look(set_up, runs, bound_memory=False)
            found: dict[RunShape, Prediction] = {}
            left = _LARGEST
            for entry in sorted(looked, key=lambda entry: entry.estimate_s):
                size = entry.partition.num_stages * entry.run.num_microbatches
                if size <= left or len(found) < _FITTING:  # however large: until these fit
                    found |= {made.run: made for made in self._simulate([entry])}
                    left -= size
            if found:
                return [found[entry.run] for entry in looked if entry.run in found]
        return []

    def _look(self, set_up: SetUp, runs: Iterable[RunShape], *, bound_memory: bool = True) -> list[_Looked]:
        """Assign layers and estimate the step. bound_memory: leave out candidates that fit by no partition; else they are taken with one
        that is made without limits, since a simulation may need less than the upper bound by which layers are assigned."""
        found = []
        for run in runs:
            try:
                partition = self._assign(run, bound_memory)
            except NothingFitsError as error:
                self.left_out[_NO_MEMORY] += 1
                self.lacks.append((error.excess_bytes, error.rank, run.layout))
                continue
            except ConfigurationError as error:
                self.trouble = self.trouble or error
                self.left_out["no partition of the layers"] += bound_memory
                continue
            found.append(_Looked(set_up, run, partition, _estimate(self.cost_model, run, partition)))
        return found

    def _assign(self, run: RunShape, bound_memory: bool) -> Partition:
        rule = self.space.partition
        try:
            return assign_layers(self.cost_model, run, rule, limit_memory=self.limit_memory)
        except NothingFitsError as error:
            if bound_memory:
                raise
            self.lacks.append((error.excess_bytes, error.rank, run.layout))
            return assign_layers(self.cost_model, run, rule, limit_memory=False)

    def _simulate(self, looked: Iterable[_Looked]) -> list[Prediction]:
        """Simulate candidates; return those that fit."""
        found = []
        for entry in looked:
            made = self.predict(entry.run, entry.partition)
            if self.space.partition == "self_adapting" and entry.run.num_chunks > 1:
                # with unequal layers, the optimum for the slowest rank may have chunks of very unequal sizes, and waits between them
                uniform = make_uniform_partition(entry.partition.num_layers, entry.partition.num_stages)
                if uniform != entry.partition and not uniform.split_points & set(self.cost_model.model.forbidden_cuts):
                    other = self.predict(entry.run, uniform)
                    made = min(made, other, key=lambda one: (not fits(one), one.step_s))
            if not self.limit_memory or fits(made):
                found.append(made)
            else:
                self.left_out[_NO_MEMORY] += 1
                self.lacks.append(lack_of(made))
        return found

    def _nothing_to_try(self) -> ConfigurationError:
        reasons = "; ".join(f"{what} ({n} tries)" for what, n in self.left_out.most_common(3)) or "no sizes to try"
        model, training, space = self.cost_model.model, self.cost_model.training, self.space
        return ConfigurationError(
            f"no parallel sizes go together on {self.cost_model.num_devices} devices with a batch of "
            f"{training.batch_samples} and {model.num_layers} layers: {reasons}; change the batch size, "
            f"or allow other sizes than pipeline={space.pipeline or 'any'}, tensor={space.tensor}"
        )

    def _nothing_fits(self) -> ConfigurationError:
        runs = [run for set_up in self.set_ups for run in (*set_up.runs, *set_up.smaller)]
        if not self.lacks:
            assert self.trouble is not None
            if len(self.set_ups) == 1:
                return self.trouble
            return ConfigurationError(
                f"no partition={self.space.partition!r} goes with any of {len(runs)} plans, for example: {self.trouble}"
            )
        return nothing_fits(self.cost_model, runs, lacks=self.lacks)


def prefer(found: Sequence[Prediction]) -> Prediction:
    """Choose between several plans of one layout: several stages a rank, layered schedules, split backwards and more microbatches must each
    save a share of the step; of plans that are nearly as fast the simplest is chosen."""

    def handicapped(entry: Prediction) -> float:
        spec = spec_of(entry.run.schedule)
        chunks, layered, split = entry.run.num_chunks > 1, spec.is_layered, spec.is_split
        return entry.step_s * (1 + chunks * CHUNKS_GAIN + layered * _LAYERED_GAIN + split * _SPLIT_GAIN)

    limit = min(map(handicapped, found)) * (1 + MICROBATCH_GAIN)
    count = min(p.run.num_microbatches for p in found if handicapped(p) <= limit)
    kept = [p for p in found if p.run.num_microbatches == count]
    fastest = min(map(handicapped, kept))

    def rank(entry: Prediction) -> tuple[Any, ...]:
        over, spec = handicapped(entry) / fastest - 1, spec_of(entry.run.schedule)
        # an eager schedule is no less simple: it sends the same tensors sooner, and is taken wherever that saves anything, so that the gain,
        # which depends on the measured speeds, does not decide
        slower, at_all_slower = math.floor(over / _ALIKE), math.floor(over / _NEARLY)
        return slower, entry.run.num_chunks, spec.is_split, spec.is_layered, at_all_slower, spec.is_eager

    return min(kept, key=rank)


def assign_layers(
    cost_model: CostModel, run: RunShape, rule: str | tuple[int, ...], *, limit_memory: bool
) -> Partition:
    """Make the partition of a run.

    Args:
        rule: the name of a rule, or layer counts.
        limit_memory: whether "self_adapting" keeps within the memory of each rank.

    Raises:
        NothingFitsError: "self_adapting" finds no partition that fits the memory.
        ConfigurationError: the rule cannot be applied to these layers and stages.
    """
    balance = cost_model.balance(run, limit_memory=limit_memory) if rule == "self_adapting" else None
    return make_partition(rule, cost_model.model.num_layers, run.layout.pipeline * run.num_chunks, balance=balance)


def _estimate(cost_model: CostModel, run: RunShape, partition: Partition) -> float:
    """Estimate a step by a closed form: the slowest rank or card for all microbatches, filling and draining the pipeline, and the part
    of the reductions that does not overlap the backward and the draining."""
    costs = cost_model.step_costs(run, partition)
    ranks, stages, chunks = run.layout.pipeline, partition.num_stages, run.num_chunks
    both = [forward + backward for forward, backward in zip(costs.forward_s, costs.backward_s, strict=True)]
    where = spec_of(run.schedule).ranks_of(ranks, chunks)
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
    # the first microbatch passes the first stage of every rank alone, and the last microbatch comes back alone
    fill = sum(both[:ranks]) - max(both[:ranks]) if chunks == 1 else sum(both) / stages * (ranks - 1)
    fill += sum(transfers[: ranks - 1])
    end, behind = 0.0, 0.0  # seconds from a rank's last backward to the first rank's
    for rank in range(ranks):
        # the reduction of the rank's first stage, whose backward is its last
        if costs.reduce_s:
            parts, whole_s = costs.reduce_parts[rank], costs.reduce_s[rank]
            reductions[rank] = max(whole_s / parts, whole_s - costs.backward_s[rank] * (1 - 1 / parts))
        end = max(end, reductions[rank] - behind + costs.update_s[rank] + costs.gather_s[rank])
        behind += costs.backward_s[rank] + transfers[rank] / 2
    return run.num_microbatches * slowest + fill + end


def _unlike(ranked: Sequence[Prediction], number: int) -> list[Prediction]:
    """The best ``number`` predictions, at most two of one layout, so that the list shows more than microbatch counts of one layout."""
    found: list[Prediction] = []
    seen: Counter[Layout] = Counter()
    for entry in ranked:
        if seen[entry.run.layout] < 2 and len(found) < number:
            seen[entry.run.layout] += 1
            found.append(entry)
    return found


def _where_time_goes(entry: Prediction) -> dict[str, float]:
    """Seconds of the step by cause, averaged over pipeline ranks."""
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
