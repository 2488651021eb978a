"""How workers and optimizer nodes reach each other, from their clusters and network cards. Pure functions.

share_nodes(["a", "b"], ["b", "a", None])                            # [[1], [0]]
sums_inside(["a", "a"], ["b"])                                       # True
near_addresses(cluster, [("roce", "10.65.0.3/16")])                  # {"node0": "10.65.0.3", "node1": ...}
"""

import ipaddress
from collections.abc import Mapping, Sequence

from lightning_holmes.cluster.topology import Cluster, OptimizerHost


def cluster_of(name: str, hosts: Sequence[OptimizerHost]) -> str | None:
    """Return the cluster of the node on host ``name``, compared without domains if no host has exactly this name; None if not known."""
    same = [host.cluster for host in hosts if host.name == name]
    return next(iter(same or [h.cluster for h in hosts if h.name.split(".")[0] == name.split(".")[0]]), None)


def share_nodes(of_ranks: Sequence[str | None], of_nodes: Sequence[str | None]) -> list[list[int]]:
    """Return for each pipeline rank the nodes that hold its stages, from the clusters of both. The nodes of a cluster are shared among the ranks of
    that cluster; ranks of clusters without nodes share the nodes that are in no rank's cluster, or all nodes if there are none. With fewer
    nodes than ranks, ranks share nodes in turn; with more, a rank has several."""
    own = {
        c: [n for n, other in enumerate(of_nodes) if other == c] for c in of_ranks if c is not None and c in of_nodes
    }
    rest = [n for n, cluster in enumerate(of_nodes) if cluster not in own] or list(range(len(of_nodes)))
    groups = [cluster if cluster in own else None for cluster in of_ranks]
    found = []
    for rank, cluster in enumerate(groups):
        nodes = rest if cluster is None else own[cluster]
        alike = [r for r, other in enumerate(groups) if other == cluster]
        place = alike.index(rank)
        found.append(nodes[place :: len(alike)] or [nodes[place % len(nodes)]])
    return found


def sums_inside(of_workers: Sequence[str], of_nodes: Sequence[str | None]) -> bool:
    """Whether the workers of a cluster sum gradients, and hand on parameters, among themselves, so that a slow link carries them once for each
    cluster: they have the same number, two or more, in each cluster, and a node is in another cluster than some of them. A node whose
    cluster is not known can be in one of several only."""
    sizes = {of_workers.count(cluster) for cluster in of_workers}
    crosses = len(set(of_workers)) > 1
    apart = any(node not in (None, cluster) or crosses for node in of_nodes for cluster in of_workers)
    return len(sizes) == 1 and min(sizes) > 1 and apart


def place_units(
    num_bytes: Mapping[int, int], num_places: int, stage_of: Mapping[int, int | None] | None = None
) -> dict[int, int]:
    """Assign a place to each unit, so that all places hold about the same number of bytes: the largest units first, each at the place
    that holds least. Units of one stage are at different places, as long as there are enough."""
    loads = [0] * num_places
    taken: dict[int, set[int]] = {}
    found = {}
    for index in sorted(num_bytes, key=lambda i: (-num_bytes[i], i)):
        stage = None if stage_of is None else stage_of[index]
        used = set() if stage is None else taken.setdefault(stage, set())
        if len(used) == num_places:
            used.clear()
        found[index] = min((place for place in range(num_places) if place not in used), key=lambda place: loads[place])
        used.add(found[index])
        loads[found[index]] += num_bytes[index]
    return found


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
