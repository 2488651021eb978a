"""The layout of a testbed: the namespace, interface, address and rate of each NIC of a topology. Pure data.

    layout = make_layout(topology, TestbedOptions(cpu_share=0.45), bed_id="demo")
    layout.hosts[0].nics[0].address            # "10.64.0.1"

Networks. The j-th InfiniBand NICs of a cluster's hosts share a network, and so do its j-th RoCE NICs; the j-th
Ethernet NICs of all hosts share one. Each network has its own bridge and subnet: 10.(64 + network).(cluster).(host
from 1)/16. All bridges are in one more namespace, the switch, so that nothing is added to the machine's own namespace.

Rates. A NIC's bandwidth applies to each direction. Traffic from one cluster to another is limited by the slower of the
two NICs and, if the topology has a Link between the clusters, all of it together by the Link's bandwidth in each
direction. A Link's latency is not emulated, since netem is not in every kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from lightning_holmes.cluster.topology import Host, Nic, Topology, TransportKind

PREFIX = "holmes-"  # of the names of namespaces, cgroups and files
MAX_SHAPED_BYTES_PER_S = 4e9  # tc's rates are 32-bit numbers; a faster NIC is not limited
_INTERFACE_NAMES: dict[str, str] = {"infiniband": "ib", "roce": "roce"}
_FIRST_NETWORK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedOptions:
    """Options of a testbed that are not part of a topology.

    Args:
        cpu_share: cores of each host (0.45: less than half a core); None leaves processes unlimited.
        host_cpu_shares: cores of single hosts by name, if they differ from cpu_share.
        ethernet_bandwidth_bytes_per_s: overrides the bandwidth of every Ethernet NIC.
        precedence: hosts get their shares before all other work on the machine. For measurements of speed.
    """

    __test__: ClassVar[bool] = False

    cpu_share: float | None = None
    host_cpu_shares: Mapping[str, float] = field(default_factory=dict)
    ethernet_bandwidth_bytes_per_s: float | None = None
    precedence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NicLayout:
    """A NIC on the testbed.

    name is the name in the topology, and for InfiniBand and RoCE that of the RDMA device in the emulated sysfs; interface is the
    network interface. fabric is the number of the network; bridge and port are names in the switch's namespace.
    """

    name: str
    kind: TransportKind
    interface: str
    fabric: int
    address: str
    bandwidth_bytes_per_s: float | None
    bridge: str
    port: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """A host on the testbed, with its namespace and NICs."""

    name: str
    cluster: str
    devices: int
    namespace: str
    folder: str  # name of its cgroup and of its sysfs folder, below those of the testbed
    cpu_share: float | None
    nics: tuple[NicLayout, ...]

    @property
    def ethernet(self) -> NicLayout:
        """The first Ethernet NIC, over which processes of different hosts connect."""
        return next(nic for nic in self.nics if nic.kind == "ethernet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A limit on all traffic from one cluster to another over one Ethernet network: a Link's bandwidth.

    destination_key is the cluster's part of the subnet in the kernel's u32 notation.
    """

    destination_key: str
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """The cable between the bridge of one cluster's Ethernet NICs and the bridge of all clusters."""

    bridge: str
    inner: str
    outer_bridge: str
    outer: str
    caps: tuple[Cap, ...]  # at the inner end: what leaves the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The names, addresses and rates of a whole testbed."""

    bed_id: str
    switch: str
    bridges: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    hosts: tuple[HostLayout, ...]

    def host(self, name: str) -> HostLayout:
        """The host with this name."""
        return next(host for host in self.hosts if host.name == name)

    def nic(self, name: str) -> tuple[HostLayout, NicLayout]:
        """The NIC "host.nic" with its host."""
        host_name, _, nic_name = name.rpartition(".")
        host = self.host(host_name)
        return host, next(nic for nic in host.nics if nic.name == nic_name)

    def nics(self) -> Iterator[tuple[HostLayout, NicLayout]]:
        """All NICs, host by host."""
        for host in self.hosts:
            for nic in host.nics:
                yield host, nic


def namespace_prefix(bed_id: str) -> str:
    """The prefix of the names of a testbed's namespaces."""
    return f"{PREFIX}{bed_id}-"


def make_layout(topology: Topology, options: TestbedOptions, *, bed_id: str) -> Layout:
    """Make the layout of a testbed."""
    capped = bool(topology.links)
    networks: dict[tuple[str, str, int], int] = {}
    bridges: list[str] = []
    trunks: list[Trunk] = []
    hosts: list[HostLayout] = []

    def network_of(cluster_index: int, nic: Nic, ordinal: int) -> tuple[int, str]:
        """Number and bridge of a NIC's network; creates them for the network's first NIC."""
        everywhere = nic.kind == "ethernet"
        key = ("", nic.kind, ordinal) if everywhere else (str(cluster_index), nic.kind, ordinal)
        if key not in networks:
            networks[key] = len(networks)
            bridges.append(f"br{networks[key]}")
        number = networks[key]
        if not (everywhere and capped):
            return number, f"br{number}"
        bridge = f"br{number}c{cluster_index}"
        if bridge not in bridges:
            bridges.append(bridge)
            trunks.append(_make_trunk(topology, number, cluster_index, bridge))
        return number, bridge

    for cluster_index, cluster in enumerate(topology.clusters):
        for position, host in enumerate(cluster.hosts):
            ordinals: Counter[str] = Counter()
            nics: list[NicLayout] = []
            taken = {nic.name for nic in host.nics if nic.kind == "ethernet"}
            for nic in _nics_of(host):
                number, bridge = network_of(cluster_index, nic, ordinals[nic.kind])
                ordinals[nic.kind] += 1
                nics.append(
                    NicLayout(
                        name=nic.name,
                        kind=nic.kind,
                        interface=_interface_name(nic, taken),
                        fabric=number,
                        address=f"10.{_FIRST_NETWORK + number}.{cluster_index}.{position + 1}",
                        bandwidth_bytes_per_s=_rate_of(nic, options),
                        bridge=bridge,
                        port=f"h{len(hosts)}n{len(nics)}",
                    )
                )
            hosts.append(
                HostLayout(
                    name=host.name,
                    cluster=cluster.name,
                    devices=host.devices,
                    namespace=f"{namespace_prefix(bed_id)}h{len(hosts)}",
                    folder=f"h{len(hosts)}",
                    cpu_share=options.host_cpu_shares.get(host.name, options.cpu_share),
                    nics=tuple(nics),
                )
            )
    return Layout(
        bed_id=bed_id,
        switch=f"{namespace_prefix(bed_id)}switch",
        bridges=tuple(bridges),
        trunks=tuple(trunks),
        hosts=tuple(hosts),
    )


def _nics_of(host: Host) -> tuple[Nic, ...]:
    """A host's NICs; a host without an Ethernet NIC gets one, since its processes must reach the other hosts."""
    if any(nic.kind == "ethernet" for nic in host.nics):
        return host.nics
    taken = {nic.name for nic in host.nics}
    name = next(name for name in (f"eth{index}" for index in range(len(taken) + 1)) if name not in taken)
    return (*host.nics, Nic(name=name, kind="ethernet"))


def _interface_name(nic: Nic, taken: set[str]) -> str:
    """The name of a NIC's interface: the NIC's name for Ethernet, another one for RDMA devices, as on real hosts."""
    if nic.kind == "ethernet":
        return nic.name
    stem = _INTERFACE_NAMES[nic.kind]
    name = next(name for name in (f"{stem}{index}" for index in range(len(taken) + 1)) if name not in taken)
    taken.add(name)
    return name


def _rate_of(nic: Nic, options: TestbedOptions) -> float | None:
    instead = options.ethernet_bandwidth_bytes_per_s if nic.kind == "ethernet" else None
    return nic.bandwidth_bytes_per_s if instead is None else instead


def _make_trunk(topology: Topology, number: int, cluster_index: int, bridge: str) -> Trunk:
    here = topology.clusters[cluster_index].name
    caps = []
    for index, other in enumerate(topology.clusters):
        for link in topology.links:
            if set(link.ends) == {here, other.name}:
                # the destination address is at byte 16 of an IPv4 header
                key = f"0x0a{_FIRST_NETWORK + number:02x}{index:02x}00/0xffffff00+16"
                caps.append(Cap(destination_key=key, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s))
    return Trunk(
        bridge=bridge,
        inner=f"in{number}c{cluster_index}",
        outer_bridge=f"br{number}",
        outer=f"out{number}c{cluster_index}",
        caps=tuple(caps),
    )
