"""The route of gradients and parameters between workers and optimizer nodes: each worker by itself, or one for its cluster or host.

    route = choose_route("auto", links, node_clusters=[["a"]], clusters=["a", "a", "b", "b"], ...)      # every rank must call
    route.aggregators[3].bring(3, buffer, ask)
    route.choice.describe()

"auto" measures both routes if a node is known to be outside a cluster with several workers, or if several hosts have several
workers each: first every worker fetches some bytes from the nodes, then one worker for each cluster does (or, in the node's own cluster,
for each host) and broadcasts them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.collective_timing import measure
from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.mesh import GroupBuilder, ProcessGroups, release
from lightning_holmes.comm.queue import CommQueue
from lightning_holmes.optim.aggregator import Aggregator, SpeakingLevel
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.plan.node_routes import ROUTES, clusters_apart, several_in_a_cluster, speaking_levels
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.sync_choice import SyncChoice, choose

_STAR, _AGGREGATOR = ROUTES
_TRIED_BYTES = 4 << 20  # at most; fewer if the time for measuring does not allow as many


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoute:
    """``aggregators``: by unit, for the units that a speaker fetches; ``choice``: None if there was no choice to make."""

    aggregators: Mapping[int, Aggregator] = field(default_factory=dict)
    choice: SyncChoice | None = None


def choose_route(
    asked: str,
    links: Sequence[NodeLink],
    *,
    place_of: Mapping[int, int],
    node_clusters: Sequence[Sequence[str | None]],
    clusters: Sequence[str],
    hosts: Sequence[str],
    placement: Placement,
    groups: ProcessGroups,
    queue: CommQueue,
    stages: Sequence[int],
) -> NodeRoute:
    """Choose the route, and build the aggregators. All ranks must call.

    Args:
        asked: "star", "aggregator" or "auto".
        links: the links to this rank's nodes.
        place_of: for each unit, the index of its node in ``links``.
        node_clusters: for each pipeline rank the clusters of its nodes; None for unknown ones.
        clusters, hosts: the cluster and the host of each global rank.
        queue: the queue in which parameters are received.
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
    name, seconds, num_bytes, reason = asked, {}, 0, "asked for"
    if own not in spoken_for:
        if asked != _AGGREGATOR:
            return NodeRoute()
        name = _STAR
        reason = (
            "no cluster of several workers lies apart from their nodes, nor have several hosts several workers each"
        )
    elif asked == "auto":
        assert groups.replicas_on_host is not None, "several workers"
        tried = torch.zeros(_TRIED_BYTES, dtype=torch.uint8)
        found = measure(_ways(links, aggregators), [tried], groups.replicas_on_host, queue)
        name, seconds, num_bytes = choose(found.seconds), dict(found.seconds), found.num_bytes
        reason = "the fastest, by what a worker needs to fetch as much"
    choice = SyncChoice(
        stages=tuple(stages),
        ranks=tuple(placement.data_parallel_group(own, 0)),
        collective=name,
        seconds=seconds,
        num_bytes=num_bytes,
        reason=reason,
    )
    if name == _STAR:
        for aggregator in dict.fromkeys(aggregators.values()):  # in the same order on all
            aggregator.close()
        aggregators = {}
    by_unit = {unit: aggregators[place] for unit, place in place_of.items() if place in aggregators}
    return NodeRoute(aggregators=by_unit, choice=choice)


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


def _ways(links: Sequence[NodeLink], aggregators: Mapping[int, Aggregator]) -> dict[str, Collective]:
    """Return the two routes to measure: each worker by itself, and one worker for the members of its aggregator."""
    return {
        _STAR: _Way(_STAR, [(link, None) for link in links]),
        _AGGREGATOR: _Way(_AGGREGATOR, [(link, aggregators.get(place)) for place, link in enumerate(links)]),
    }


@dataclass(frozen=True, slots=True)
class _Way:
    """Implements the part of Collective that is measured: ``sum`` fetches ``tensor``, uint8, from each node."""

    name: str
    links: Sequence[tuple[NodeLink, Aggregator | None]]

    def sum(self, tensor: Tensor) -> None:
        for number, (link, aggregator) in enumerate(self.links):
            ask = _asking(link, tensor)
            if aggregator is None:
                ask()
            else:
                aggregator.bring(number, tensor, ask)

    def scatter(self, tensor: Tensor) -> None:
        raise AssertionError("parameters come whole")

    def gather(self, tensor: Tensor) -> None:
        raise AssertionError("parameters come whole")


def _asking(link: NodeLink, tensor: Tensor) -> Callable[[], None]:
    def ask() -> None:
        link.ask({"ask": "try", "num_bytes": tensor.numel()}, into=[tensor])

    return ask
