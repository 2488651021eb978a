"""The planner: chooses partition, schedule, microbatches and sharding from what is known and what is asked. Pure: plain data in, a Plan out.

    asked = settle(known, asked)
    plan = choose(known, asked)
    plan.partition, plan.schedule, plan.num_microbatches, plan.prediction.step_s, plan.notes

With costs, the search (search/) decides within the run's layout, which is fixed. Without costs, layers are assigned by count, and there
are four microbatches per pipeline rank. complete() adds what follows from the sharding. A run and ``lightning-holmes plan`` differ in
how they fill the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.collective_choice import Sharding, choose_collectives
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.groups import GroupPlan
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition
from lightning_holmes.plan.placement import Placement, clusters_of, layout_of
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.search.candidates import SearchSpace, space_of
from lightning_holmes.plan.search.notes import describe_result
from lightning_holmes.plan.search.shard_search import search_with_sharding
from lightning_holmes.plan.self_adapting import Balance, NothingFitsError, solve

_MICROBATCHES_PER_RANK = 4
_LENGTH_GAIN = 0.9  # of a step: another length of the pipeline is worth a note
_LAYERED_CHUNKS = 4  # chunks of a breadth-first pipeline whose costs are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a run before its plan is chosen.

    Attributes:
        layers, num_layers: the name and length of the layer list; None and 0 for a module that is not split.
        batch_size: samples in a training batch of one replica, if known.
        forbidden_cuts: layers after which no stage may end.
        costs: the costs of the module on these hosts; or why they are not known, if they are needed.
        described: where the costs come from, in words.
        not_interleaved: why several stages on a rank must not be chosen, in words; None: they may.
        not_layered: why stages of one rank cannot run breadth-first, in words; None: they can.
        may_split: whether a schedule that splits backwards may be chosen, as far as the costs do not tell.
        why_not_sharded: why parameters cannot live in shards with ``sharding="auto"``, in words; None: they can.
        num_microbatches: the only number of microbatches that is exact, and why; None: all are.
        former: the plan of the run before, if it was for the same layers and ranks.
        notes: of choices that were made before.
    """

    topology: Topology
    placement: Placement
    layers: str | None = None
    num_layers: int = 0
    batch_size: int | None = None
    forbidden_cuts: tuple[int, ...] = ()
    costs: CostModel | str | None = None
    described: str = ""
    not_interleaved: str | None = None
    not_layered: str | None = None
    may_split: bool = True
    why_not_sharded: str | None = None
    num_microbatches: tuple[int, str] | None = None
    former: Plan | None = None
    notes: tuple[str, ...] = ()

    def may_be_layered(self, asked: Asked) -> bool:
        """Whether one pipeline rank may run several stages breadth-first: if that is asked for, or if parameters may be sharded."""
        return asked.is_layered or (asked.sharding == "auto" and self.why_not_sharded is None)


def settle(known: Known, asked: Asked) -> tuple[Known, Asked]:
    """Set what has one possible value only, and note why."""
    notes = []
    if asked.num_microbatches == "auto" and known.num_microbatches is not None:
        count, why = known.num_microbatches
        asked = replace(asked, num_microbatches=count)
        notes.append(f"num_microbatches: {count}, {why}")
    is_open = asked.num_chunks == "auto" and isinstance(asked.partition, str)
    if known.not_layered is not None and is_open and known.may_be_layered(asked):
        if asked.is_layered:
            notes.append(f"num_chunks: 1, so that nothing is layered: {known.not_layered}")
        asked = replace(asked, num_chunks=1)
    return replace(known, notes=(*known.notes, *notes)), asked


def choose(known: Known, asked: Asked) -> Plan:
    """Choose the plan, with a note for each automatic choice; without groups, collectives and a sharded optimizer, which complete() adds.

    Raises:
        ConfigurationError: the options do not fit the module; NothingFitsError if nothing fits the memory.
    """
    if known.layers is None:
        return _whole(known, asked)
    if known.former is not None:
        former = known.former
        return _plan(
            known,
            asked,
            former.partition,
            former.schedule,
            former.num_chunks,
            former.num_microbatches if asked.num_microbatches == "auto" else asked.num_microbatches,
            ["partition, schedule and microbatches: as in the run before, so that every rank keeps its part"],
            prediction=former.prediction,
            sharding="parameters" if former.sharding == "parameters" else "none",
        )
    if not isinstance(known.costs, CostModel):
        return _by_count(known, asked, known.costs)
    try:
        return _by_costs(known, asked, known.costs)
    except ConfigurationError as error:
        if not known.forbidden_cuts or isinstance(error, NothingFitsError):
            raise
        # a later check names the value that a split would lose
        return _by_count(known, asked, "no split point is free")


def complete(
    plan: Plan,
    *,
    topology: Topology,
    sharding: Sharding,
    sockets: bool,
    by_links: bool = True,
    groups: Sequence[GroupPlan] = (),
    asked: Asked,
    notes: Sequence[str] = (),
) -> Plan:
    """Add what is sharded, how replicas sum gradients (for the arguments see choose_collectives), and the groups, with notes."""
    lines = list(notes)
    sync = "auto" if asked.optimizer_nodes else asked.gradient_sync  # optimizer nodes sum the gradients
    collectives = choose_collectives(
        sync, plan.placement, topology, sharding=sharding, sockets=sockets, by_links=by_links
    )
    for name in dict.fromkeys(collectives):
        ranks = ", ".join(str(rank) for rank, own in enumerate(collectives) if own == name)
        lines.append(f"gradient_sync: {name}, over the replicas of pipeline rank {ranks}")
    if asked.eval_num_microbatches == "auto" and plan.pipeline_parallel_size > 1:
        lines.append("eval_num_microbatches: 1, exact for any evaluation step")
    return replace(plan, sharding=sharding, collectives=collectives, groups=tuple(groups), notes=(*plan.notes, *lines))


def can_split(model: ModelCost) -> bool:
    """Whether backwards can be split, as far as costs tell: nothing is run again in them, and every layer trains."""
    return model.recomputed == 0 and all(layer.backward > 0 for layer in model.layers)


def plan_of_prediction(known: Known, asked: Asked, best: Prediction, notes: Sequence[str]) -> Plan:
    """The plan that was predicted."""
    run = best.run
    sharding: Sharding = "parameters" if best.sharded_parameters else "none"
    return _plan(
        known,
        asked,
        best.partition,
        run.schedule,
        run.num_chunks,
        run.num_microbatches,
        notes,
        prediction=best,
        sharding=sharding,
    )


def _plan(
    known: Known,
    asked: Asked,
    partition: Partition,
    schedule: str,
    num_chunks: int,
    num_microbatches: int,
    notes: Sequence[str],
    **more: Any,
) -> Plan:
    placement, lines = known.placement, list(known.notes)
    size = placement.pipeline_parallel_size
    if known.layers is not None and asked.layers == "auto" and size > 1:
        lines.append(f"layers: {known.layers}, the largest list that every step calls in order")
    return Plan(
        pipeline_parallel_size=size,
        data_parallel_size=placement.data_parallel_size,
        tensor_parallel_size=placement.tensor_parallel_size,
        num_microbatches=num_microbatches,
        eval_num_microbatches=1 if asked.eval_num_microbatches == "auto" else asked.eval_num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
        layers=known.layers or WHOLE_MODULE,
        partition=partition,
        placement=placement,
        clusters=_clusters(known),
        notes=(*lines, *notes),
        **more,
    )


def _clusters(known: Known) -> tuple[str, ...]:
    ranks = range(known.placement.pipeline_parallel_size)
    return tuple("+".join(clusters_of(known.placement, known.topology, rank)) for rank in ranks)


def _whole(known: Known, asked: Asked) -> Plan:
    if not isinstance(asked.partition, str) or asked.layers != "auto":
        raise ConfigurationError(
            f"layers={asked.layers!r} and partition={asked.partition!r} are for a pipeline, but this module runs "
            f"whole and no layer list of it was found; leave them out"
        )
    count = 1 if asked.num_microbatches == "auto" else asked.num_microbatches
    return _plan(known, asked, Partition((1,)), "1f1b" if asked.schedule == "auto" else asked.schedule, 1, count, ())


def _by_count(known: Known, asked: Asked, reason: str | None) -> Plan:
    """Plan without costs: layers by count, four microbatches per pipeline rank, but no more than the batch has samples.

    Args:
        reason: why no costs are known, for the note about the partition.
    """
    size, num_layers, cuts = known.placement.pipeline_parallel_size, known.num_layers, known.forbidden_cuts
    notes = []
    chunks = None if asked.num_chunks == "auto" else asked.num_chunks
    if chunks is None and not isinstance(asked.partition, str):  # the layer counts imply it
        chunks = max(1, len(asked.partition) // size)
    by_count = asked.partition == "uniform"
    if chunks is None and asked.is_layered:
        by_count = False
        most = max(1, (num_layers - len(set(cuts))) // size)
        chunks = most if size == 1 else min(_LAYERED_CHUNKS, most)
        what = "a layer a stage" if chunks == num_layers else "as many stages as can be without losing a value"
        notes.append(f"num_chunks: {chunks}, {what if size == 1 else 'by count'}")
    chunks = chunks or 1
    if not isinstance(asked.partition, str):
        partition = make_partition(asked.partition, num_layers, size * chunks)
    elif by_count or size * chunks == 1:
        partition = make_partition("uniform", num_layers, size * chunks)
    else:
        partition = _even(num_layers, size, chunks, cuts)
        why = f", since {reason}" if reason else ""
        notes.append(f"partition: {', '.join(map(str, partition.layer_counts))} layers, by count{why}")
    count = 1 if asked.num_microbatches == "auto" else asked.num_microbatches
    if asked.num_microbatches == "auto" and size > 1:
        most = _MICROBATCHES_PER_RANK * size
        count = min(most, known.batch_size or most)
        notes.append(f"num_microbatches: {count}, four a pipeline rank as far as the batch reaches")
    across_clusters = len(set(_clusters(known))) > 1
    schedule = ("eager_" if across_clusters else "") + ("1f1b" if chunks == 1 else "interleaved_1f1b")
    schedule = asked.schedule if asked.schedule != "auto" else schedule
    if asked.schedule == "auto" and schedule == "eager_1f1b":
        notes.append(
            "schedule: eager_1f1b, which runs transfers between clusters beside computation and holds the activations "
            f"of up to {2 * size - 1} microbatches where 1f1b holds {size}"
        )
    return _plan(known, asked, partition, schedule, chunks, count, notes)


def _by_costs(known: Known, asked: Asked, costs: CostModel) -> Plan:
    """Plan with costs: the fastest schedule, number of microbatches and partition by simulation. Raises what the search raises."""
    space = space_of(
        asked,
        interleaves=known.not_interleaved is None,
        layout=layout_of(known.placement, costs.network.topology),
        splits=known.may_split and can_split(costs.model),
        is_settled=not asked.leaves_open,
    )
    result = search_with_sharding(costs, space, asked.sharding, why_not=known.why_not_sharded)
    notes = describe_result(result, costs, asked, not_interleaved=known.not_interleaved, described=known.described)
    if asked.pipeline_parallel_size == "auto" and (faster := _faster_length(known, asked, costs, space, result.best)):
        notes = (*notes, faster)
    return plan_of_prediction(known, asked, result.best, notes)


def _faster_length(known: Known, asked: Asked, costs: CostModel, space: SearchSpace, best: Prediction) -> str | None:
    """Say which other length of the pipeline is predicted to be faster for as many samples; None: none is, by a share that predictions can tell.
    It is not chosen: it would change how many replicas share the data, and so the batch of a step, by what was measured at the start."""
    lengths = replace(space, layout=None, tensor=(known.placement.tensor_parallel_size,))
    try:
        other = search_with_sharding(costs, lengths, asked.sharding, why_not=known.why_not_sharded).best
    except ConfigurationError:  # no other length is possible
        return None
    layout = other.run.layout
    if layout.pipeline == known.placement.pipeline_parallel_size or other.step_s > _LENGTH_GAIN * best.step_s:
        return None
    return (
        f"pipeline_parallel_size={layout.pipeline} would take {other.step_s / best.step_s:.2f} of this time for as many samples a step, by "
        f"prediction; set it to have that: the data is then dealt to {layout.data} instead of {known.placement.data_parallel_size} replicas"
    )


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
