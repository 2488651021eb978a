"""How workers and optimizer nodes reach each other, from what is known of clusters and cards; and which node holds what. Pure.

clusters_apart((0, 1, 2, 3), ["a", "a", "b", "b"], of_nodes=["a"], known=True)     # [(2, 3)]
near_addresses(cluster, [("roce", "10.65.0.3/16")])                                # {"node0": "10.65.0.3", "node1": ...}
"""

import ipaddress
from collections.abc import Mapping, Sequence

from lightning_holmes.cluster.topology import Cluster

ROUTES = ("star", "aggregator")
"""Every worker sends its gradients to an optimizer node by itself; or one for its cluster, if the node is not in that."""


def clusters_apart(
    ranks: Sequence[int], clusters: Sequence[str], of_nodes: Sequence[str | None], *, known: bool
) -> list[tuple[int, ...]]:
    """Those of ``ranks`` in each cluster that has several of them, and from which one of their nodes lies apart.

    Args:
        clusters: of each global rank.
        of_nodes: of the nodes of these ranks; None: not known.
        known: only where that is known: the node is in another cluster, or the ranks are in several and it can be in one at most.
    """
    crosses = len({clusters[rank] for rank in ranks}) > 1
    return [
        members
        for cluster, members in several_in_a_cluster(ranks, clusters).items()
        if any(other != cluster and (other is not None or crosses or not known) for other in of_nodes)
    ]


def several_in_a_cluster(ranks: Sequence[int], clusters: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Those of ``ranks`` in each cluster that has several of them."""
    inside: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        inside[clusters[rank]] = (*inside.get(clusters[rank], ()), rank)
    return {cluster: members for cluster, members in inside.items() if len(members) > 1}


def near_addresses(cluster: Cluster, ports: Sequence[tuple[str, str]]) -> dict[str, str]:
    """By host of ``cluster`` the address of an optimizer node in it on a fast card whose network both have; the fastest of the host's.

    Args:
        ports: kind, and address with prefix length, of each of the node's RDMA ports that are up.
    """
    networks = [(kind, ipaddress.ip_interface(address)) for kind, address in ports]
    found = {}
    for host in cluster.hosts:
        cards = sorted(host.nics, key=lambda nic: -(nic.bandwidth_bytes_per_s or 0.0))
        alike = [
            str(port.ip)
            for nic in cards
            if nic.up
            for kind, port in networks
            if kind == nic.kind and any(ipaddress.ip_address(address) in port.network for address in nic.addresses)
        ]
        if alike:
            found[host.name] = alike[0]
    return found


def cut_in_units(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Whole parameters, by their elements, in at most ``count`` groups of about as many; those of a group in the order given."""
    groups: list[set[str]] = [set() for _ in range(min(count, len(sizes)))]
    loads = [0] * len(groups)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        groups[least].add(name)
        loads[least] += sizes[name]
    return [[name for name in sizes if name in group] for group in groups if group]


def assign(num_bytes: Mapping[int, int], num_places: int, stage_of: Mapping[int, int | None]) -> dict[int, int]:
    """A place for each unit, such that all hold about the same number of bytes, and the units of a stage lie in as many places as they
    can: the largest first, where least is."""
    loads = [0] * num_places
    found = {}
    stages: dict[int | None, list[int]] = {}
    for index in num_bytes:
        stages.setdefault(stage_of[index], []).append(index)
    for units in sorted(stages.values(), key=lambda units: -sum(num_bytes[index] for index in units)):
        free: set[int] = set()
        for index in sorted(units, key=lambda index: (-num_bytes[index], index)):
            free = free or set(range(num_places))
            place = min(free, key=lambda place: (loads[place], place))
            free.remove(place)
            found[index] = place
            loads[place] += num_bytes[index]
    return found
