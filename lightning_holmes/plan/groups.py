"""The process groups of a plan: ranks, purpose, transport and reason of each, for its report. comm/mesh.py builds them.

plan_groups(placement, pairs, transports, clusters)[0].name        # "data_parallel_0"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from lightning_holmes.cluster.record import Text, record
from lightning_holmes.plan.placement import Placement, cluster_levels

Axis = Literal["pipeline", "data_parallel", "tensor_parallel", "messages", "world"]
"""The purpose of a process group: an axis of the mesh; messages between its ranks, without tensors of the model; or all ranks."""
Use = Literal["tensors", "messages", "world"]
Transports = Callable[[Sequence[int], Use], tuple[str, str]]
"""(ranks of a group, purpose of the group) -> (transport, reason)."""
Ranks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A process group: its global ranks, the transport it uses, and the reason."""

    name: Text
    axis: Axis
    ranks: Ranks
    transport: Text
    reason: Text


def plan_groups(
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
                    found.append(_group(f"{name}_{level}_{number}", "data_parallel", (*part_ranks,), use, transports))
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
