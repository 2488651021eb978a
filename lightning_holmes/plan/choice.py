"""Choice: what "auto" and the rules of partition come to in a run, with a reason for each, from costs where they are known.

    choice = choose_by_costs(options, cost_model, layout, batch_size=32)
    choice.partition, choice.schedule, choice.num_microbatches, choice.prediction.step_s

Every candidate is simulated (plan/simulator.py): there are few, since the layout is settled. Without costs, layers are assigned
by count and a pipeline rank gets four microbatches. Pure: plain data in, plain data out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.compute_order import EAGER, INTERLEAVED
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.not_fitting import BY_HAND, WITH_STATES, Lack, lack_of, nothing_fits, without_states
from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.prediction import Prediction, fits, predict
from lightning_holmes.plan.refining import refine
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.self_adapting import Balance, NothingFitsError, solve

_MICROBATCHES_PER_RANK = 4
_MOST_PER_RANK = 16
_COUNTS_TRIED = 8
_NEARLY = 0.01  # candidates so near each other are told apart by simplicity
# What more microbatches must save, where FLOPs were counted and where layers were timed, and why
_COUNTED_GAIN = 0.08, "counted FLOPs do not know what small microbatches lose"
_TIMED_GAIN = 0.03, "each has its messages, and work around the layers that is not timed"
_INTERLEAVING_GAIN = 0.05  # what interleaving must save: more messages and more work a stage than its costs know
_CHUNKS_TRIED = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """prediction: of a step, where costs are known. notes: a line for everything that was chosen."""

    partition: Partition
    schedule: str
    num_chunks: int
    num_microbatches: int
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None


def choose_without_costs(
    options: PlanOptions,
    *,
    pipeline_parallel_size: int,
    num_layers: int,
    batch_size: int | None,
    forbidden_cuts: Sequence[int] = (),
    across_clusters: bool = False,
    reason: str | None = None,
) -> Choice:
    """Layers by count, four microbatches a pipeline rank as far as the batch reaches.

    Args:
        across_clusters: stages lie in different clusters.
        reason: why no costs are known; noted where they would have decided something.
    """
    size = pipeline_parallel_size
    chunks = _fixed_chunks(options, size) or 1
    notes = []
    if isinstance(options.partition, str) and options.partition != "uniform" and size > 1:
        partition = _even(num_layers, size, chunks, forbidden_cuts)
        why = f", since {reason}" if reason else ""
        notes.append(f"partition: {_counts(partition)} layers, by count{why}")
    else:
        partition = make_partition("uniform" if size == 1 else options.partition, num_layers, size * chunks)
    count = 1 if options.num_microbatches == "auto" else options.num_microbatches
    if options.num_microbatches == "auto" and size > 1:
        most = _MICROBATCHES_PER_RANK * size
        count = min(most, batch_size or most)
        notes.append(f"num_microbatches: {count}, four a pipeline rank as far as the batch reaches")
    schedule = ("eager_" if across_clusters else "") + ("1f1b" if chunks == 1 else "interleaved_1f1b")
    schedule = options.schedule if options.schedule != "auto" else schedule
    if options.schedule == "auto" and schedule == "eager_1f1b":
        notes.append(
            "schedule: eager_1f1b, which hides transfers between clusters behind computation and holds the activations "
            f"of up to {2 * size - 1} microbatches where 1f1b holds {size}"
        )
    return Choice(
        partition=partition,
        schedule=schedule,
        num_chunks=chunks,
        num_microbatches=count,
        notes=tuple(notes),
    )


def choose_by_costs(
    options: PlanOptions,
    cost_model: CostModel,
    layout: Layout,
    *,
    batch_size: int,
    not_interleaved: str | None = None,
    prefers_eager: bool = False,
    described: str = "",
) -> Choice:
    """The fastest schedule, number of microbatches and partition by simulation.

    Args:
        batch_size: samples in a batch of one replica.
        not_interleaved: why interleaving is not to be chosen, in words; None: it may be.
        prefers_eager: take a schedule that gives transfers time where its prediction is as good as another's.
        described: how the costs came about, for the notes.

    Raises:
        NothingFitsError: no candidate fits the memory even if the optimizer keeps no states, by how much, and what would
            make it fit. Where one fits only so, or where the options settle all, that is noted.
        ConfigurationError: the options do not fit the module; no partition avoids the forbidden cuts.
    """
    num_layers = cost_model.model.num_layers
    found: list[tuple[RunShape, Prediction]] = []
    lacking: list[Lack] = []
    trouble: ConfigurationError | None = None
    notes: list[str] = []
    for run in _runs(options, layout, batch_size, num_layers, not_interleaved is None):
        try:
            partition = _fill_buckets(options, cost_model, run, limit_memory=True)
        except NothingFitsError as error:
            lacking.append(Lack(run=run, excess_bytes=error.excess_bytes, rank=error.rank))
            partition = _fill_buckets(options, cost_model, run, limit_memory=False)
        except ConfigurationError as error:
            trouble = trouble or error
            continue
        made = predict(cost_model, run, partition)
        if options.partition == "self_adapting" and run.num_chunks > 1:
            # of unlike layers, the slowest rank's optimum may have chunks of very unlike sizes, and wait between them
            uniform = make_uniform_partition(num_layers, partition.num_stages)
            if uniform != partition and not uniform.cuts & set(cost_model.model.forbidden_cuts):
                made = min(made, predict(cost_model, run, uniform), key=lambda entry: (not fits(entry), entry.step_s))
        found.append((run, made))
    if not found:
        assert trouble is not None
        raise trouble
    fitting = [(run, made) for run, made in found if fits(made)]
    if not fitting:
        lacking += [lack_of(made) for _, made in found]
        reason = nothing_fits(cost_model, [run for run, _ in found], lacks=lacking)
        if isinstance(options.partition, str) and options.leaves_open:
            choice = choose_by_costs(
                options,
                without_states(cost_model, reason),
                layout,
                batch_size=batch_size,
                not_interleaved=not_interleaved,
                prefers_eager=prefers_eager,
                described=described,
            )
            return replace(choice, notes=(*choice.notes, f"{WITH_STATES}{reason}"))
        notes.append(f"{BY_HAND}{reason}")
    found = fitting or found
    plain = min((p.step_s for run, p in found if run.num_chunks == 1), default=math.inf)
    kept = [(r, p) for r, p in found if r.num_chunks == 1 or p.step_s < plain * (1 - _INTERLEAVING_GAIN)]
    kept = kept or found
    gain = _COUNTED_GAIN if cost_model.model.unit == "flops" else _TIMED_GAIN
    limit = min(p.step_s for _, p in kept) * (1 + gain[0])
    count = min(r.num_microbatches for r, p in kept if p.step_s <= limit)
    kept = [(r, p) for r, p in kept if r.num_microbatches == count]
    fastest = min(p.step_s for _, p in kept)
    run, best = min(
        kept,
        key=lambda entry: (
            math.floor((entry[1].step_s / fastest - 1) / _NEARLY),
            entry[0].num_chunks,
            (entry[0].schedule in EAGER) != prefers_eager,
            entry[0].num_microbatches,
        ),
    )
    unrefined = best  # what others are compared with: their layers have not been moved either
    if options.partition == "self_adapting":
        best = refine(cost_model, unrefined)
    if isinstance(options.partition, str) and options.partition != "uniform":
        notes.append(_partition_note(options, cost_model, run, best, described))
    if options.num_microbatches == "auto":
        notes.append(_microbatch_note(run, unrefined, found, gain))
    if options.schedule == "auto":
        notes.append(_schedule_note(run, unrefined, found, not_interleaved))
    notes.append(f"prediction: {best.step_s:.3g} s a step, {best.timeline.bubble_share:.0%} of it bubble ({described})")
    return Choice(
        partition=best.partition,
        schedule=run.schedule,
        num_chunks=run.num_chunks,
        num_microbatches=run.num_microbatches,
        notes=tuple(notes),
        prediction=best,
    )


# candidates


def _fixed_chunks(options: PlanOptions, size: int) -> int | None:
    """Chunks a rank where they are settled."""
    if options.num_chunks != "auto":
        return options.num_chunks
    return options.chunks_of_counts(size)


def _interleaved(name: str, size: int, num_layers: int) -> list[tuple[str, int]]:
    """With each number of chunks that the layers reach for."""
    return [(name, number) for number in _CHUNKS_TRIED if size * number <= num_layers]


def _runs(
    options: PlanOptions, layout: Layout, batch_size: int, num_layers: int, may_interleave: bool
) -> Iterator[RunShape]:
    size = layout.pipeline
    chunks = _fixed_chunks(options, size)
    schedules: list[tuple[str, int]]
    if options.schedule != "auto":
        if chunks is not None:
            schedules = [(options.schedule, chunks)]
        elif options.schedule in INTERLEAVED:
            schedules = _interleaved(options.schedule, size, num_layers) or [(options.schedule, _CHUNKS_TRIED[0])]
        else:
            schedules = [(options.schedule, 1)]
    elif chunks is not None and chunks > 1:
        schedules = [(name, chunks) for name in sorted(INTERLEAVED, reverse=True)]
    else:
        schedules = [("1f1b", 1), ("eager_1f1b", 1)] if size > 1 else [("1f1b", 1)]
        if may_interleave and size > 1 and chunks is None:
            schedules += [entry for name in sorted(INTERLEAVED) for entry in _interleaved(name, size, num_layers)]
    counts = (
        microbatch_counts(size, batch_size) if options.num_microbatches == "auto" else (int(options.num_microbatches),)
    )
    for name, number in schedules:
        for count in counts:
            if number > 1 and count < size and len(schedules) > 1:
                continue
            yield RunShape(
                layout=layout,
                schedule=name,
                num_microbatches=count,
                microbatch_samples=-(-batch_size // count),
                num_chunks=number,
            )


def microbatch_counts(size: int, batch_size: int) -> tuple[int, ...]:
    """Numbers of microbatches worth a try: those that divide the batch evenly, from one a rank to sixteen."""
    most = min(batch_size, _MOST_PER_RANK * size)
    counts = [count for count in range(size, most + 1) if batch_size % count == 0]
    if not counts:  # a batch smaller than the pipeline, or of a prime number of samples
        counts = sorted({min(batch_size, size * factor) for factor in (1, 2, 4)})
    while len(counts) > _COUNTS_TRIED:  # the two nearest in ratio: one of them tells enough
        ratios = [counts[index + 1] / counts[index] for index in range(len(counts) - 1)]
        del counts[ratios.index(min(ratios[1:-1])) if len(ratios) > 2 else 1]
    return tuple(counts)


def _fill_buckets(options: PlanOptions, cost_model: CostModel, run: RunShape, *, limit_memory: bool) -> Partition:
    stages, num_layers = run.layout.pipeline * run.num_chunks, cost_model.model.num_layers
    by_rank = cost_model.speeds(run.layout)
    speeds = [by_rank[stage % run.layout.pipeline] for stage in range(stages)]
    balance = cost_model.balance(run, limit_memory=limit_memory) if options.partition == "self_adapting" else None
    return make_partition(options.partition, num_layers, stages, speeds=speeds, balance=balance)


def _even(num_layers: int, size: int, chunks: int, forbidden_cuts: Sequence[int]) -> Partition:
    """By count, but for cuts that lose a value; where all do, the check of the partition says which value."""
    uniform = make_uniform_partition(num_layers, size * chunks)
    if not uniform.cuts & set(forbidden_cuts):
        return uniform
    balance = Balance(
        seconds=((1.0,) * num_layers,) * size, num_chunks=chunks, forbidden_cuts=tuple(sorted(forbidden_cuts))
    )
    try:
        return Partition(solve(balance).layer_counts)
    except ConfigurationError:
        return uniform


# the reasons


def _counts(partition: Partition) -> str:
    return ", ".join(map(str, partition.layer_counts))


def _partition_note(
    options: PlanOptions, cost_model: CostModel, run: RunShape, best: Prediction, described: str
) -> str:
    loads = cost_model.balance(run, limit_memory=False).loads(best.partition.layer_counts)
    shown = ", ".join(f"{load:.3g}" for load in loads[:8]) + (" ..." if len(loads) > 8 else "")
    note = f"partition: {_counts(best.partition)} layers, {options.partition}: {shown} s a microbatch on the ranks"
    uniform = make_uniform_partition(cost_model.model.num_layers, best.partition.num_stages)
    if uniform == best.partition:
        return note + "; as by count"
    if uniform.cuts & set(cost_model.model.forbidden_cuts):
        return note + "; by count a cut would lose a value"
    return note + f"; by count a step would take {predict(cost_model, run, uniform).step_s / best.step_s:.2f}x as long"


def _microbatch_note(
    run: RunShape, best: Prediction, found: Sequence[tuple[RunShape, Prediction]], gain: tuple[float, str]
) -> str:
    others = [
        f"{other.num_microbatches}: {p.step_s / best.step_s:.2f}x"
        for other, p in found
        if (other.schedule, other.num_chunks) == (run.schedule, run.num_chunks)
        and other.num_microbatches != run.num_microbatches
    ]
    note = f"num_microbatches: {run.num_microbatches} of {run.microbatch_samples} samples, the fastest by prediction"
    if any(p.step_s < best.step_s for r, p in found if r.num_microbatches > run.num_microbatches):
        note = (
            f"num_microbatches: {run.num_microbatches} of {run.microbatch_samples} samples; more must save {gain[0]:.0%} "
            f"by prediction, since {gain[1]}"
        )
    return note + (f" ({', '.join(others)})" if others else "")


def _schedule_note(
    run: RunShape, best: Prediction, found: Sequence[tuple[RunShape, Prediction]], not_interleaved: str | None
) -> str:
    fastest: dict[tuple[str, int], float] = {}
    for other, p in found:
        name = (other.schedule, other.num_chunks)
        fastest[name] = min(p.step_s, fastest.get(name, math.inf))
    others = [
        f"{name} with {chunks} chunks a rank: {seconds / best.step_s:.2f}x"
        if chunks > 1
        else f"{name}: {seconds / best.step_s:.2f}x"
        for (name, chunks), seconds in fastest.items()
        if (chunks, name) != (run.num_chunks, run.schedule)
    ]
    chosen = run.schedule + (f" with {run.num_chunks} chunks a rank" if run.num_chunks > 1 else "")
    note = f"schedule: {chosen}" + (f" ({', '.join(others)})" if others else "")
    if run.num_chunks == 1 and any(chunks > 1 for _, chunks in fastest):
        note += "; interleaving is taken where it saves 5 %"
    return note + (f"; {not_interleaved}" if not_interleaved is not None else "")


def repeat_choice(options: PlanOptions, former: Choice, *, reason: str) -> Choice:
    """The former choice again, where the options leave it open: parameters stay where they are."""
    return replace(
        former,
        num_microbatches=former.num_microbatches if options.num_microbatches == "auto" else options.num_microbatches,
        notes=(f"partition, schedule and microbatches: {reason}",),
    )
