"""Completes a hand-written topology from the hosts' inventories: interfaces, addresses, and which NICs are up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_holmes.cluster.fabric import RDMA_KINDS
from lightning_holmes.cluster.live_host import LiveHost
from lightning_holmes.cluster.network import Cluster, Host, Nic, TransportKind, fabric_of
from lightning_holmes.cluster.topology import Topology


def with_live_nics(topology: Topology, live: Mapping[str, LiveHost]) -> Topology:
    """Fill in what the file leaves open from the live hosts; the file's own values are kept, but a NIC that is down counts as down.

    NICs are matched by name, else by interface. A NIC of the file that the live host does not have counts as down, with a
    warning. A host without NICs in the file gets all NICs of its live host; a host without an Ethernet NIC that is up gets the Ethernet NICs.

    Args:
        live: the live host of each host of the file, by the file's name.
    """
    warnings = list(topology.warnings)
    clusters = []
    for cluster in topology.clusters:
        hosts = tuple(_complete(host, live[host.name], cluster.name, warnings) for host in cluster.hosts)
        shared = (kind for kind in RDMA_KINDS if all(any(nic.kind == kind for nic in host.nics) for host in hosts))
        kind: TransportKind = next(shared, "ethernet") if cluster.fabric is None else cluster.fabric
        without = [host.name for host in hosts if kind != "ethernet" and host.nic_of(kind) is None]
        fallback = cluster.fallback
        if without and fallback is None:
            fallback = f"no {kind} card is up on {', '.join(without)}"
            warnings.append(f"cluster {cluster.name}: {fallback}; groups with such a host use Ethernet")
        clusters.append(Cluster(name=cluster.name, hosts=hosts, fabric=kind, fallback=fallback, speeds=cluster.speeds))
    return replace(topology, clusters=tuple(clusters), warnings=tuple(warnings))


def _complete(host: Host, live: LiveHost, cluster: str, warnings: list[str]) -> Host:
    available = live.inventory.nics()
    nics = []
    for nic in host.nics:
        by_name = [other for other in available if other.name == nic.name]
        by_interface = [o for o in available if o.interface is not None and o.interface in (nic.name, nic.interface)]
        found = next(iter([*by_name, *by_interface]), None)
        if found is None:
            has = ", ".join(other.name for other in available) or "none"
            warnings.append(
                f"cluster {cluster}: the topology names the NIC {nic.name} of host {host.name}, but {live.name} has "
                f"{has}; it is taken to be down"
            )
            nics.append(replace(nic, up=False))
            continue
        nics.append(
            replace(
                nic,
                bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s or found.bandwidth_bytes_per_s,
                interface=nic.interface or found.interface,
                addresses=nic.addresses or found.addresses,
                up=nic.up and found.up,
                fabric=_fabric(nic, cluster),
            )
        )
    names = {nic.name for nic in nics}
    missing_ethernet = not any(nic.kind == "ethernet" and nic.up for nic in nics)
    for other in available:
        wanted = not host.nics or (other.kind == "ethernet" and missing_ethernet)
        if wanted and other.name not in names:
            nics.append(replace(other, fabric=_fabric(replace(other, fabric=None), cluster)))
    return replace(host, nics=tuple(nics))


def _fabric(nic: Nic, cluster: str) -> str | None:
    """The fabric of a NIC of the file: a cluster of the file is one RDMA fabric unless a NIC names another; Ethernet is left as it is."""
    return fabric_of(nic, cluster) if nic.kind != "ethernet" else nic.fabric
