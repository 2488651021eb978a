"""Which way gradients and parameters go between workers and optimizer nodes: each worker for itself, or one for its cluster.

    route = choose_route("auto", links, node_clusters=[["a"]], clusters=["a", "a", "b", "b"], ...)      # every rank must call
    route.aggregators[3].bring(3, buffer, ask)
    route.choice.describe()

Left to us it is measured where it is known that a node lies outside a cluster with several workers: all fetch so many bytes from the
nodes, and then one for each cluster does, and hands them on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_holmes.comm.collective_timing import measure
from lightning_holmes.comm.mesh import GroupBuilder, ProcessGroups, release
from lightning_holmes.comm.queue import CommQueue
from lightning_holmes.optim.aggregator import Aggregator
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.plan.node_routes import ROUTES, clusters_apart
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.sync_choice import SyncChoice, choose

_STAR, _AGGREGATOR = ROUTES
_TRIED_BYTES = 4 << 20  # at most; as many as fit the time that measuring may take


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoute:
    """``aggregators``: by unit, of those that a speaker brings; ``choice``: None where there was none to make."""

    aggregators: Mapping[int, Aggregator] = field(default_factory=dict)
    choice: SyncChoice | None = None


def choose_route(
    asked: str,
    links: Sequence[NodeLink],
    *,
    place_of: Mapping[int, int],
    node_clusters: Sequence[Sequence[str | None]],
    clusters: Sequence[str],
    placement: Placement,
    groups: ProcessGroups,
    queue: CommQueue,
    stages: Sequence[int],
) -> NodeRoute:
    """All ranks must call.

    Args:
        asked: "star", "aggregator" or "auto".
        links: to this rank's nodes; ``place_of``: a unit's, among these.
        node_clusters: for each pipeline rank those of its nodes, as far as they are known.
        clusters: of each global rank.
        queue: what parameters are received in.
    """
    builder, own = groups.builder, groups.pipeline_rank
    apart = [
        clusters_apart(placement.data_parallel_group(stage, 0), clusters, of_nodes, known=asked != _AGGREGATOR)
        for stage, of_nodes in enumerate(node_clusters)
    ]
    aggregator = None
    if asked != _STAR:
        for stage, of_stage in enumerate(apart):
            for number, members in enumerate(of_stage):
                aggregator = _build(builder, members, f"holmes_node_{stage}_{number}") or aggregator
    far = {place for place, cluster in enumerate(node_clusters[own]) if cluster != clusters[builder.rank]}
    candidates = {
        _STAR: _Way(_STAR, [links[place] for place in sorted(far)], None),
        _AGGREGATOR: _Way(_AGGREGATOR, [links[place] for place in sorted(far)], aggregator),
    }
    name, seconds, num_bytes, reason = asked, {}, 0, "asked for"
    if not apart[own]:
        if asked != _AGGREGATOR:
            return NodeRoute()
        name, reason = _STAR, "no cluster has several workers and lies apart from their nodes"
    elif asked == "auto":
        assert groups.replicas_on_host is not None, "several workers"
        tried = torch.zeros(_TRIED_BYTES, dtype=torch.uint8)
        found = measure(candidates, [tried], groups.replicas_on_host, queue)
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
    if aggregator is not None and name == _STAR:
        aggregator.close()
    if aggregator is None or name == _STAR:
        return NodeRoute(choice=choice)
    return NodeRoute(aggregators={unit: aggregator for unit, place in place_of.items() if place in far}, choice=choice)


def _build(builder: GroupBuilder, members: Sequence[int], name: str) -> Aggregator | None:
    """None on ranks that are no members. All ranks must call."""
    on_host = builder.backend != "gloo"
    up, down = (builder.build(members, f"{name}_{way}", on_host=on_host) for way in ("up", "down"))
    if up is None or down is None:
        return None
    both = [up, down]

    def let_go() -> None:
        builder.owned[:] = [group for group in builder.owned if group not in both]
        release(both)

    return Aggregator(up=up, down=down, where=lambda: builder.describe(up), release=let_go)


@dataclass(frozen=True, slots=True)
class _Way:
    """Implements Collective, as far as it is measured: ``tensor``, uint8, comes from each of the nodes that lie apart."""

    name: str
    links: Sequence[NodeLink]
    aggregator: Aggregator | None

    def sum(self, tensor: Tensor) -> None:
        for number, link in enumerate(self.links):
            ask = _asking(link, tensor)
            if self.aggregator is None:
                ask()
            else:
                self.aggregator.bring(number, tensor, ask)

    def scatter(self, tensor: Tensor) -> None:
        raise AssertionError("parameters come whole")

    def gather(self, tensor: Tensor) -> None:
        raise AssertionError("parameters come whole")


def _asking(link: NodeLink, tensor: Tensor) -> Callable[[], None]:
    def ask() -> None:
        link.ask({"ask": "try", "num_bytes": tensor.numel()}, into=[tensor])

    return ask
