"""PipelinePlan: partition, schedule and microbatches of a run where the options say "auto" or name a rule, with a reason for each choice.

    choice = plan_by_costs(options, cost_model, layout)
    choice.partition, choice.schedule, choice.num_microbatches, choice.prediction.step_s

With costs, the search (plan/search/) decides within the run's layout, which is fixed. Without costs, layers are assigned
by count, and there are four microbatches per pipeline rank. Pure: plain data in, plain data out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.run_shape import Layout
from lightning_holmes.plan.search.candidates import space_of
from lightning_holmes.plan.search.notes import describe_result
from lightning_holmes.plan.search.shard_search import search_with_sharding
from lightning_holmes.plan.self_adapting import Balance, solve
from lightning_holmes.plan.training import AskedSharding

_MICROBATCHES_PER_RANK = 4
_LAYERED_CHUNKS = 4  # chunks of a breadth-first pipeline whose costs are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The chosen partition, schedule and microbatches. prediction: of a step, if costs are known. notes: a line for each choice.
    sharded_parameters: whether the search chose to shard parameters."""

    partition: Partition
    schedule: str
    num_chunks: int
    num_microbatches: int
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    sharded_parameters: bool = False


def plan_by_count(
    options: PlanOptions,
    *,
    pipeline_parallel_size: int,
    num_layers: int,
    batch_size: int | None,
    forbidden_cuts: Sequence[int] = (),
    across_clusters: bool = False,
    reason: str | None = None,
) -> PipelinePlan:
    """Plan without costs: layers by count, four microbatches per pipeline rank, but no more than batch_size.

    Args:
        across_clusters: whether stages lie in different clusters.
        reason: why no costs are known, for the note about the partition.
    """
    size = pipeline_parallel_size
    notes = []
    chunks = options.num_chunks if options.num_chunks != "auto" else options.chunks_of_counts(size)
    by_count = options.partition == "uniform"
    if chunks is None and options.is_layered:
        by_count = False
        most = max(1, (num_layers - len(set(forbidden_cuts))) // size)
        chunks = most if size == 1 else min(_LAYERED_CHUNKS, most)
        what = "a layer a stage" if chunks == num_layers else "as many stages as can be without losing a value"
        notes.append(f"num_chunks: {chunks}, {what if size == 1 else 'by count'}")
    chunks = chunks or 1
    if not isinstance(options.partition, str):
        partition = make_partition(options.partition, num_layers, size * chunks)
    elif by_count or size * chunks == 1:
        partition = make_partition("uniform", num_layers, size * chunks)
    else:
        partition = _even(num_layers, size, chunks, forbidden_cuts)
        why = f", since {reason}" if reason else ""
        notes.append(f"partition: {', '.join(map(str, partition.layer_counts))} layers, by count{why}")
    count = 1 if options.num_microbatches == "auto" else options.num_microbatches
    if options.num_microbatches == "auto" and size > 1:
        most = _MICROBATCHES_PER_RANK * size
        count = min(most, batch_size or most)
        notes.append(f"num_microbatches: {count}, four a pipeline rank as far as the batch reaches")
    schedule = ("eager_" if across_clusters else "") + ("1f1b" if chunks == 1 else "interleaved_1f1b")
    schedule = options.schedule if options.schedule != "auto" else schedule
    if options.schedule == "auto" and schedule == "eager_1f1b":
        notes.append(
            "schedule: eager_1f1b, which runs transfers between clusters beside computation and holds the activations "
            f"of up to {2 * size - 1} microbatches where 1f1b holds {size}"
        )
    return PipelinePlan(
        partition=partition,
        schedule=schedule,
        num_chunks=chunks,
        num_microbatches=count,
        notes=tuple(notes),
    )


def plan_by_costs(
    options: PlanOptions,
    cost_model: CostModel,
    layout: Layout,
    *,
    not_interleaved: str | None = None,
    may_split: bool = True,
    sharding: AskedSharding = "none",
    why_not_sharded: str | None = None,
    described: str = "",
) -> PipelinePlan:
    """Plan with costs: the fastest schedule, number of microbatches and partition by simulation.

    Args:
        not_interleaved: why interleaving must not be chosen, in words; None: it may be chosen.
        may_split: whether a schedule that splits backwards may be chosen, as far as the costs do not tell.
        sharding: as HolmesStrategy's argument. ``cost_model`` is for unsharded parameters, or for what is asked.
        why_not_sharded: why "auto" must not shard parameters, in words; None: it may.
        described: where the costs come from, for the notes.

    Raises what the search raises.
    """
    space = space_of(
        options,
        interleaves=not_interleaved is None,
        layout=layout,
        recomputation=(False,),
        splits=may_split and can_split(cost_model.model),
        is_settled=not options.leaves_open,
    )
    result = search_with_sharding(cost_model, space, sharding, why_not=why_not_sharded)
    best = result.best
    return PipelinePlan(
        partition=best.partition,
        schedule=best.run.schedule,
        num_chunks=best.run.num_chunks,
        num_microbatches=best.run.num_microbatches,
        notes=describe_result(result, cost_model, options, not_interleaved=not_interleaved, described=described),
        prediction=best,
        sharded_parameters=best.sharded_parameters,
    )


def can_split(model: ModelCost) -> bool:
    """Whether backwards can be split, as far as costs tell: nothing is run again in them, and every layer trains."""
    return model.recomputed == 0 and all(layer.backward > 0 for layer in model.layers)


def _even(num_layers: int, size: int, chunks: int, forbidden_cuts: Sequence[int]) -> Partition:
    """Layers by count, without forbidden split points. If that is impossible, by count alone: a later check names the value that is lost."""
    uniform = make_uniform_partition(num_layers, size * chunks)
    if not uniform.split_points & set(forbidden_cuts):
        return uniform
    balance = Balance(
        seconds=((1.0,) * num_layers,) * size, num_chunks=chunks, forbidden_cuts=tuple(sorted(forbidden_cuts))
    )
    try:
        return Partition(solve(balance))
    except ConfigurationError:
        return uniform


def repeat_plan(options: PlanOptions, former: PipelinePlan, *, reason: str) -> PipelinePlan:
    """Repeat the former partition and schedule, so that parameters stay where they are, and its microbatches if the options leave them open."""
    return replace(
        former,
        num_microbatches=former.num_microbatches if options.num_microbatches == "auto" else options.num_microbatches,
        notes=(f"partition, schedule and microbatches: {reason}",),
    )
