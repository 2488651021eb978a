"""Chooses the collective that sums the gradients of each pipeline rank's replicas, from the links between them. Pure.

    choose_collectives("auto", placement, topology, sharding="none", sockets=True)   # ("hierarchical", "all_reduce")

Inside a cluster: what the backend does best; a sharded optimizer or sharded parameters need shares of the sum only. Across
clusters: the sum in two levels where it is predicted to be faster than a ring through all members, by the speeds of the
topology; where these are not known, too, since a link between clusters is seldom as fast as those inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_cost import ring_all_reduce_s, two_level_all_reduce_s
from lightning_holmes.plan.placement import Placement, cluster_levels
from lightning_holmes.plan.route import REACHED, Channel, Network

COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "p2p", "hierarchical")
Sharding = Literal["none", "optimizer", "parameters"]
"""What is sharded over the replicas of a stage; "parameters": gradients and the optimizer's states, too."""

_NUM_BYTES = 4e6  # of the sum that is compared


def check_collective(name: str, argument: str = "gradient_sync") -> None:
    """Refuse a name that no group could use.

    Raises:
        ConfigurationError: the name is unknown; the message lists the valid ones.
    """
    if name not in ("auto", *COLLECTIVE_NAMES):
        raise ConfigurationError(
            f'{argument}={name!r} is unknown; use "auto" or one of {", ".join(repr(n) for n in COLLECTIVE_NAMES)}'
        )


def notes_of(gradient_sync: str | tuple[str, ...], placement: Placement, clusters: Sequence[str]) -> list[str]:
    """Return a line if ``gradient_sync`` has no effect on this placement. ``clusters``: the cluster of each global rank.

    Raises:
        ConfigurationError: no group of the placement can use the collective that is asked for.
    """
    size = placement.pipeline_parallel_size
    levels = [bool(cluster_levels(placement.data_parallel_group(rank), clusters)[0]) for rank in range(size)]
    names = [gradient_sync] * size if isinstance(gradient_sync, str) else gradient_sync
    lacking = [rank for rank, name in enumerate(names) if name == "hierarchical" and not levels[rank]]
    if lacking and (len(lacking) == size or not isinstance(gradient_sync, str)):
        raise ConfigurationError(
            'gradient_sync="hierarchical" needs a data-parallel group that has as many ranks, two or more, in each of '
            'several clusters, and here is none; use "auto", or a pipeline_parallel_size with which groups cross'
        )
    if gradient_sync != "auto" and placement.data_parallel_size == 1:
        return [f"gradient_sync={gradient_sync!r} has nothing to do: there is one replica"]
    return []


def choose_collectives(
    asked: str | tuple[str, ...],
    placement: Placement,
    topology: Topology,
    *,
    sharding: Sharding,
    sockets: bool,
    by_links: bool = True,
) -> tuple[str, ...]:
    """Choose a collective for the replicas of each pipeline rank; none if there is one replica.

    Args:
        asked: "auto", or the name of the collective for every group that can use it; or, by a plan file, a name for each pipeline rank.
        sockets: groups use gloo, not NCCL.
        by_links: whether the topology's links may decide: not if all ranks are on one host, whatever it says.
    """
    if placement.data_parallel_size == 1:
        return ()
    clusters = [cluster.name for cluster, _ in topology.places()]
    found = []
    for pipeline_rank in range(placement.pipeline_parallel_size):
        ranks = placement.data_parallel_group(pipeline_rank)
        inside, across = cluster_levels(ranks, clusters)
        name = asked if isinstance(asked, str) else asked[pipeline_rank]
        if name == "auto" or (asked == "hierarchical" and not inside):
            name = "all_reduce"
            if sharding != "none":  # gloo reduces and scatters by an all_reduce, which sends twice as much
                name = "p2p" if sockets else "reduce_scatter"
            # the two-level scatter is a whole sum, which sharded parameters cannot use
            levels = bool(inside) and sharding != "parameters" and by_links
            if levels and _two_levels_are_faster(
                topology, ranks, inside, across, shares=sharding != "none", sockets=sockets
            ):
                name = "hierarchical"
        found.append(name)
    return tuple(found)


def _two_levels_are_faster(
    topology: Topology,
    ranks: Sequence[int],
    inside: Sequence[Sequence[int]],
    across: Sequence[Sequence[int]],
    *,
    shares: bool,
    sockets: bool,
) -> bool:
    """Whether a sum in two levels is predicted to be faster than a ring, or than half of one if only shares are needed."""
    names = [host.name for _, host in topology.places()]
    # inside a host nothing is slower than between clusters
    network = Network(topology, local_bytes_per_s=1e12, efficiency=REACHED, sockets=sockets)
    index = {host.name: place for place, host in enumerate(network.hosts)}

    def channel_of(members: Sequence[int]) -> Channel:
        return network.group([index[names[rank]] for rank in members])

    def ring_s(members: Sequence[int]) -> float:
        channel = channel_of(members)
        bandwidth, latency = channel.bytes_per_s, channel.latency_s
        return ring_all_reduce_s(_NUM_BYTES, size=len(members), bandwidth=bandwidth, latency=latency)

    try:
        between = channel_of(across[0])
        in_levels = two_level_all_reduce_s(
            max(map(ring_s, inside)),
            _NUM_BYTES,
            num_clusters=len(inside),
            bandwidth=between.bytes_per_s,
            latency=between.latency_s,
        )
        return in_levels < ring_s(ranks) * (0.5 if shares else 1.0)
    except ConfigurationError:
        return True
