"""Nic, Host, Link, Cluster: the parts of a Topology (topology.py). Plain data, checked when it is made.

record.py reads them. A field's alias is its name in files, where the value has a unit.

    nic = Nic(name="mlx5_0", kind="infiniband", bandwidth_bytes_per_s=25e9, interface="ib0", addresses=("10.0.0.1",))
    host = Host(name="node-0", devices=8, nics=(nic,))
    host.nic_of("infiniband")      # the first InfiniBand card that is up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from lightning_holmes.cluster.record import Bandwidth, Latency, PlacedError, Text, check_unique, record

TransportKind = Literal["infiniband", "roce", "ethernet"]
TRANSPORT_KINDS: tuple[str, ...] = get_args(TransportKind)


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card, or one port of it.

    Attributes:
        name: NCCL's name: the RDMA device (``mlx5_0``; ``mlx5_0:2`` for one of several ports) or the interface.
        kind: its network protocol.
        bandwidth_bytes_per_s: the nominal rate; None if not known.
        interface: the network interface that sockets use; None if there is none or it is not known.
        addresses: the interface's IP addresses, IPv4 first.
        up: whether it can be used; True by default, so also for cards in a hand-written file.
        fabric: cards with the same fabric reach each other over ``kind``; None if not known.
    """

    name: Text
    kind: TransportKind
    bandwidth_bytes_per_s: Annotated[Bandwidth | None, Field(alias="bandwidth")] = None
    interface: Text | None = None
    addresses: tuple[Text, ...] = ()
    up: bool = True
    fabric: Text | None = None


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: its number of devices (processes), and its network cards.

    nics: the Ethernet card that reaches the master, or the default route, comes before other Ethernet cards.
    ranks: the global ranks that the launcher started here; None if ranks are assigned in the order of the file.
    device_type: a value of `lightning-holmes plan --device_type`; used only for plans.
    """

    name: Text
    devices: Annotated[int, Field(ge=1, le=4096)]
    nics: tuple[Nic, ...] = ()
    device_type: Text | None = None
    ranks: tuple[Annotated[int, Field(ge=0, le=10_000_000)], ...] | None = None

    def __post_init__(self) -> None:
        check_unique([(("nics", i, "name"), n.name) for i, n in enumerate(self.nics)], f"NICs of host {self.name!r}")
        if self.ranks is not None and len(self.ranks) != self.devices:
            problem = f"{len(self.ranks)} ranks for {self.devices} devices; write one rank for each device"
            raise PlacedError(f"host {self.name!r}: {problem}", ("ranks",))

    def nic_of(self, kind: str, fabric: str | None = None) -> Nic | None:
        """The first NIC of this kind (and fabric, if given) that is up."""
        usable = (nic for nic in self.nics if nic.kind == kind and nic.up)
        return next((nic for nic in usable if fabric in (None, nic.fabric)), None)


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between two clusters, which are named in ``ends``. It applies to both directions.

    Attributes:
        bandwidth_bytes_per_s: one way, of all hosts together.
    """

    ends: tuple[str, str]
    transport: TransportKind
    bandwidth_bytes_per_s: Annotated[Bandwidth, Field(alias="bandwidth")]
    latency_s: Annotated[Latency, Field(alias="latency")]
    measured: bool = False

    def __post_init__(self) -> None:
        if self.ends[0] == self.ends[1]:
            raise PlacedError(f"both ends are {self.ends[0]!r}; a link joins two different clusters", ("ends",))


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The speed between two hosts of one cluster on one transport.

    Attributes:
        bandwidth_bytes_per_s: one way. Measured with one TCP connection over the NICs' interfaces, or nominal.
        latency_s: one way; None if not measured.
        nic_bytes_per_s: the nominal rate of the slower of the two NICs. RDMA can reach it where TCP does not.
    """

    transport: TransportKind
    bandwidth_bytes_per_s: Annotated[Bandwidth, Field(alias="bandwidth")]
    latency_s: Annotated[Latency | None, Field(alias="latency")] = None
    nic_bytes_per_s: Annotated[Bandwidth | None, Field(alias="nic_bandwidth")] = None
    measured: bool = False


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts that share a fast network.

    Attributes:
        fabric: the kind of the fast network; None if not known.
        fallback: why not all hosts can use the fabric now (a NIC is down), or None. Groups with such a host
            use Ethernet.
        speeds: between two of its hosts, one entry per transport.
    """

    name: Text
    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    fabric: TransportKind | None = None
    fallback: str | None = None
    speeds: tuple[LinkSpeed, ...] = ()

    def __post_init__(self) -> None:
        speeds = [(("speeds", i, "transport"), speed.transport) for i, speed in enumerate(self.speeds)]
        check_unique(speeds, f"speeds of cluster {self.name!r}")

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return sum(host.devices for host in self.hosts)

    def speed(self, transport: str) -> LinkSpeed | None:
        """The speed on one transport; None if not known."""
        return next((speed for speed in self.speeds if speed.transport == transport), None)


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerHost:
    """A host without devices that is an optimizer node; ``cluster``: the cluster whose fast network it shares, if any."""

    name: Text
    cluster: str | None = None


def fabric_of(nic: Nic, cluster: str) -> str:
    """The name of an RDMA card's fabric. Cards without one are on a fabric of their kind and cluster."""
    return nic.fabric or f"{nic.kind}/{cluster}"
