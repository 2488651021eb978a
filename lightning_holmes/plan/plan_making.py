"""Makes the plan of a run from the options, the topology and placement, and the choices of pipeline_plan.py. Pure: data in, data out.

make_plan(options, topology=..., placement=..., num_layers=12, ...)
"""

from collections.abc import Callable, Sequence
from typing import Literal

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_choice import Sharding
from lightning_holmes.plan.made_for import MadeFor
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.pipeline_plan import PipelinePlan, plan_by_count
from lightning_holmes.plan.placement import Placement, cluster_levels, clusters_of
from lightning_holmes.plan.plan import WHOLE_MODULE, Axis, GroupPlan, Plan
from lightning_holmes.plan.plan_options import PlanOptions

Use = Literal["tensors", "messages", "world"]
# (ranks of a group, purpose of the group) -> (transport, reason)
Transports = Callable[[Sequence[int], Use], tuple[str, str]]


def make_plan(
    options: PlanOptions,
    *,
    topology: Topology,
    placement: Placement,
    edges: Sequence[tuple[int, int]] = (),
    layers: str | None,
    num_layers: int,
    batch_size: int | None,
    transports: Transports,
    notes: Sequence[str] = (),
    choice: PipelinePlan | None = None,
    sharding: Sharding = "none",
    collectives: tuple[str, ...] = (),
    made_for: MadeFor | None = None,
) -> Plan:
    """The plan of a run, with a note for each automatic choice.

    Args:
        edges: pairs of pipeline ranks between which tensors are sent.
        layers: the name of the layer list that was found; None for a module that is not split.
        num_layers: the length of the layer list.
        batch_size: samples in a training batch of one replica, if known.
        transports: returns the transport of a group of ranks, in words, and the reason.
        notes: of earlier choices.
        choice: made from costs; None: plan by count.
        sharding, collectives: what is sharded over replicas, and how they sum gradients.
        made_for: the module and clusters, for the plan's file.

    Raises:
        ConfigurationError: the options do not fit the module.
    """
    size, notes = placement.pipeline_parallel_size, list(notes)
    if layers is None:
        if not isinstance(options.partition, str) or options.layers != "auto":
            raise ConfigurationError(
                f"layers={options.layers!r} and partition={options.partition!r} are for a pipeline, but this module runs "
                f"whole and no layer list of it was found; leave them out"
            )
        whole = 1 if options.num_microbatches == "auto" else options.num_microbatches
        schedule = "1f1b" if options.schedule == "auto" else options.schedule
        choice = PipelinePlan(partition=Partition((1,)), schedule=schedule, num_chunks=1, num_microbatches=whole)
    elif options.layers == "auto" and size > 1:
        notes.append(f"layers: {layers}, the largest list that every step calls in order")
    clusters = tuple("+".join(clusters_of(placement, topology, rank)) for rank in range(size))
    choice = choice or plan_by_count(
        options,
        pipeline_parallel_size=size,
        num_layers=num_layers,
        batch_size=batch_size,
        across_clusters=len(set(clusters)) > 1,
    )
    notes += choice.notes
    for name in dict.fromkeys(collectives):
        ranks = ", ".join(str(rank) for rank, own in enumerate(collectives) if own == name)
        notes.append(f"gradient_sync: {name}, over the replicas of pipeline rank {ranks}")
    evaluation = 1 if options.eval_num_microbatches == "auto" else options.eval_num_microbatches
    if options.eval_num_microbatches == "auto" and size > 1:
        notes.append("eval_num_microbatches: 1, exact for any evaluation step")
    return Plan(
        pipeline_parallel_size=size,
        data_parallel_size=placement.data_parallel_size,
        tensor_parallel_size=placement.tensor_parallel_size,
        num_microbatches=choice.num_microbatches,
        eval_num_microbatches=evaluation,
        schedule=choice.schedule,
        num_chunks=choice.num_chunks,
        layers=layers or WHOLE_MODULE,
        partition=choice.partition,
        placement=placement,
        clusters=clusters,
        groups=tuple(_groups(placement, edges, transports, [cluster.name for cluster, _ in topology.places()])),
        notes=tuple(notes),
        sharding=sharding,
        collectives=collectives,
        made_for=made_for,
    )


def _groups(
    placement: Placement, pairs: Sequence[tuple[int, int]], transports: Transports, clusters: Sequence[str]
) -> list[GroupPlan]:
    """The groups of more than one rank: data-parallel groups with their subgroups inside and across clusters, tensor groups,
    pipelines, edges of pipelines that use another transport than the pipeline; then the groups for messages, and all ranks."""
    found = []
    messages: list[tuple[str, tuple[int, ...]]] = []
    tensor = placement.tensor_parallel_size
    for rank in range(placement.pipeline_parallel_size if placement.data_parallel_size > 1 else 0):
        for part in range(tensor):
            members = placement.data_parallel_group(rank, part)
            name = f"data_parallel_{rank}" + (f"_{part}" if tensor > 1 else "")
            found.append(_group(name, "data_parallel", members, "gradients of one stage", transports))
            inside, across = cluster_levels(members, clusters)
            for level, groups in (("inside", inside), ("across", across)):
                use = f"gradients of one stage {level} clusters, if summed so"
                for number, part_ranks in enumerate(groups):
                    found.append(
                        _group(f"{name}_{level}_{number}", "data_parallel", tuple(part_ranks), use, transports)
                    )
    for rank in range(placement.pipeline_parallel_size if tensor > 1 else 0):
        for replica in range(placement.data_parallel_size):
            members = placement.tensor_parallel_group(rank, replica)
            name = f"tensor_parallel_{rank}_{replica}"
            found.append(_group(name, "tensor_parallel", members, "inside the layers of one stage", transports))
            messages.append((f"tensor_messages_{rank}_{replica}", members))
    for replica in range(placement.data_parallel_size if placement.pipeline_parallel_size > 1 else 0):
        for part in range(tensor):
            members = placement.pipeline_group(replica, part)
            place = f"{replica}" + (f"_{part}" if tensor > 1 else "")
            whole = _group(f"pipeline_{place}", "pipeline", members, "between stages", transports)
            found.append(whole)
            messages.append((f"messages_{place}", members))
            for source, destination in pairs:
                name = f"edge_{place}_{source}_{destination}"
                ends = (members[source], members[destination])
                edge = _group(name, "pipeline", ends, f"activations, stage {source} to {destination}", transports)
                if edge.transport != whole.transport:
                    found.append(edge)
    for name, members in messages:
        found.append(_group(name, "messages", members, "shapes, logs and errors", transports))
    if placement.world_size > 1:
        use = "signals, and what is logged with sync_dist"
        found.append(_group("world", "world", tuple(range(placement.world_size)), use, transports))
    return found


def _group(name: str, axis: Axis, ranks: tuple[int, ...], use: str, transports: Transports) -> GroupPlan:
    transport, reason = transports(ranks, axis if axis in ("messages", "world") else "tensors")
    return GroupPlan(name=name, axis=axis, ranks=ranks, transport=transport, reason=f"{use}; {reason}")
