"""How workers and optimizer nodes reach each other, from their clusters and network cards. Pure functions.

clusters_apart((0, 1, 2, 3), ["a", "a", "b", "b"], of_nodes=["a"], known=True)     # [(2, 3)]
speaking_levels((0, 1, 2, 3), ["x", "x", "y", "y"])                                # [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
near_addresses(cluster, [("roce", "10.65.0.3/16")])                                # {"node0": "10.65.0.3", "node1": ...}
"""

import ipaddress
from collections.abc import Sequence

from lightning_holmes.cluster.topology import Cluster

ROUTES = ("star", "aggregator")
"""star: every worker sends its gradients to the optimizer nodes. aggregator: one worker of a cluster sends their sum if the node is elsewhere."""


def clusters_apart(
    ranks: Sequence[int], clusters: Sequence[str], of_nodes: Sequence[str | None], *, known: bool
) -> list[tuple[int, ...]]:
    """Group ``ranks`` by cluster; return the groups of two or more for which at least one of their nodes is, or may be, in another cluster.

    Args:
        clusters: the cluster of each global rank.
        of_nodes: the clusters of the nodes of these ranks; None: not known.
        known: return a group only if that is certain: a node is in another cluster, or the ranks are in several clusters, so that
            a node whose cluster is not known can be in one of them at most.
    """
    crosses = len({clusters[rank] for rank in ranks}) > 1
    return [
        members
        for cluster, members in several_in_a_cluster(ranks, clusters).items()
        if any(other != cluster and (other is not None or crosses or not known) for other in of_nodes)
    ]


def several_in_a_cluster(ranks: Sequence[int], clusters: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Group ``ranks`` by cluster; return the groups of two or more."""
    inside: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        inside[clusters[rank]] = (*inside.get(clusters[rank], ()), rank)
    return {cluster: members for cluster, members in inside.items() if len(members) > 1}


def speaking_levels(members: Sequence[int], hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """The groups of each level, innermost first, in which one member sends for all: the members on each host, then groups with one
    member of each host. A single level with all members if they are on one host, one on each host, or unequal numbers.

    Args:
        members: global ranks in one cluster.
        hosts: the host of each global rank.
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
    """For each host of ``cluster``, the address at which it reaches an optimizer node in that cluster over RDMA cards of one subnet.

    Hosts without such a card are left out; of several, the host's fastest card counts.

    Args:
        ports: (kind, address with prefix length) of each RDMA port of the node that is up.
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
