"""The route of gradients and parameters between workers and optimizer nodes: each worker by itself, or one for its cluster or host.

    route = choose_route("auto", node_clusters=[["a"]], clusters=["a", "a", "b", "b"], ...)      # every rank must call
    route.aggregators[3].bring(3, buffer, ask)
    route.told

"auto": one worker speaks for a cluster of several workers whose nodes are known to be outside of it, and for a host of several workers
where several hosts have as many.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_holmes.comm.mesh import GroupBuilder, ProcessGroups, release
from lightning_holmes.optim.aggregator import Aggregator, SpeakingLevel
from lightning_holmes.plan.node_routes import ROUTES, clusters_apart, several_in_a_cluster, speaking_levels
from lightning_holmes.plan.placement import Placement

_STAR, _AGGREGATOR = ROUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoute:
    """``aggregators``: by unit, for the units that a speaker fetches; ``told``: the route in words, empty if there was no choice to make."""

    aggregators: Mapping[int, Aggregator] = field(default_factory=dict)
    told: str = ""


def choose_route(
    asked: str,
    *,
    place_of: Mapping[int, int],
    node_clusters: Sequence[Sequence[str | None]],
    clusters: Sequence[str],
    hosts: Sequence[str],
    placement: Placement,
    groups: ProcessGroups,
    stages: Sequence[int],
) -> NodeRoute:
    """Choose the route, and build the aggregators. All ranks must call.

    Args:
        asked: "star", "aggregator" or "auto".
        place_of: for each unit, the index of its node.
        node_clusters: for each pipeline rank the clusters of its nodes; None for unknown ones.
        clusters, hosts: the cluster and the host of each global rank.
    """
    builder, own = groups.builder, groups.pipeline_rank
    far: Aggregator | None = None
    near: Aggregator | None = None
    spoken_for = set()
    for stage, of_nodes in enumerate(node_clusters):
        ranks = placement.data_parallel_group(stage, 0)
        apart = clusters_apart(ranks, clusters, of_nodes, known=asked != _AGGREGATOR)
        for cluster, members in several_in_a_cluster(ranks, clusters).items():
            levels = speaking_levels(members, hosts)
            name = f"holmes_node_{stage}_{cluster}"
            if asked == _STAR or (members not in apart and len(levels) == 1):
                continue
            spoken_for.add(stage)
            made = _build(builder, levels if members in apart else levels[:1], name)
            if builder.rank in members:
                far = Aggregator(made) if members in apart else None
                near = Aggregator(made[:1]) if len(levels) > 1 else None
    aggregators = {
        place: aggregator
        for place, cluster in enumerate(node_clusters[own])
        if (aggregator := near if cluster == clusters[builder.rank] else far or near) is not None
    }
    name, reason = asked, "asked for"
    if own not in spoken_for:
        if asked != _AGGREGATOR:
            return NodeRoute()
        name = _STAR
        reason = (
            "no cluster of several workers lies apart from their nodes, nor have several hosts several workers each"
        )
    elif asked == "auto":
        name, reason = _AGGREGATOR, "each byte then crosses once for all workers of a cluster or a host"
    told = f"gradients of stages {', '.join(map(str, stages))} to optimizer nodes: {name}; {reason}"
    if name == _STAR:
        for aggregator in dict.fromkeys(aggregators.values()):  # in the same order on all
            aggregator.close()
        aggregators = {}
    by_unit = {unit: aggregators[place] for unit, place in place_of.items() if place in aggregators}
    return NodeRoute(aggregators=by_unit, told=told)


def _build(builder: GroupBuilder, levels: Sequence[Sequence[Sequence[int]]], name: str) -> list[SpeakingLevel]:
    """Build this rank's group of each level; none on ranks that are not members. All ranks must call."""
    found = []
    for depth, groups in enumerate(levels):
        for number, members in enumerate(groups):
            on_host = builder.backend != "gloo"
            up, down = (
                builder.build(members, f"{name}_{depth}_{number}_{way}", on_host=on_host) for way in ("up", "down")
            )
            if up is not None and down is not None:
                let_go = functools.partial(_let_go, builder, [up, down])
                found.append(
                    SpeakingLevel(up=up, down=down, where=functools.partial(builder.describe, up), release=let_go)
                )
    return found


def _let_go(builder: GroupBuilder, groups: list[dist.ProcessGroup]) -> None:
    builder.owned[:] = [group for group in builder.owned if group not in groups]
    release(groups)
