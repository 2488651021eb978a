"""How workers and optimizer nodes reach each other, from what is known of clusters and cards. Pure.

clusters_apart((0, 1, 2, 3), ["a", "a", "b", "b"], of_nodes=["a"], known=True)     # [(2, 3)]
speaking_levels((0, 1, 2, 3), ["x", "x", "y", "y"])                                # [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
near_addresses(cluster, [("roce", "10.65.0.3/16")])                                # {"node0": "10.65.0.3", "node1": ...}
"""

import ipaddress
from collections.abc import Sequence

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


def speaking_levels(members: Sequence[int], hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """The groups of each level, innermost first, in which one speaks for all: the members on each host, and those who can speak for
    their hosts at the same time; or all at once, where hosts have one member each, or unlike numbers.

    Args:
        members: global ranks in one cluster.
        hosts: of each global rank.
    """
    on_host: dict[str, tuple[int, ...]] = {}
    for rank in members:
        on_host[hosts[rank]] = (*on_host.get(hosts[rank], ()), rank)
    inside = list(on_host.values())
    sizes = {len(ranks) for ranks in inside}
    if len(inside) == 1 or len(sizes) > 1 or sizes == {1}:
        return [[tuple(members)]]
    return [inside, list(zip(*inside, strict=True))]


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
