"""Nic, Host, Link, Cluster: the nouns of a topology. Plain data, checked when it is made.

Topology (topology.py) holds them together; topology_yaml.py reads and writes them.

    nic = Nic(name="mlx5_0", kind="infiniband", bandwidth_bytes_per_s=25e9, interface="ib0", addresses=("10.0.0.1",))
    host = Host(name="node-0", devices=8, nics=(nic,))
    host.nic_of("infiniband")      # the first such card that is up
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_holmes.errors import ConfigurationError

TransportKind = Literal["infiniband", "roce", "ethernet"]
TRANSPORT_KINDS: tuple[str, ...] = get_args(TransportKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card, or one port of it.

    Attributes:
        name: as NCCL knows it: the RDMA device (``mlx5_0``; ``mlx5_0:2`` for a port of several) or the interface.
        kind: what it speaks.
        bandwidth_bytes_per_s: the rate it states; None where that is not known.
        interface: the network interface behind it, by which sockets use it; None if there is none or it is not known.
        addresses: the interface's IP addresses, IPv4 first.
        up: whether it can be used. What a hand-written file names is taken to be up.
        fabric: cards of one fabric reach each other over ``kind``; None where that is not known.
        near_devices: the GPUs of the host (by PCI order) that no other RDMA card is nearer to.
    """

    name: str
    kind: TransportKind
    bandwidth_bytes_per_s: float | None = None
    interface: str | None = None
    addresses: tuple[str, ...] = ()
    up: bool = True
    fabric: str | None = None
    near_devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_kind(self.kind, f"kind of NIC {self.name!r}")
        if self.bandwidth_bytes_per_s is not None:
            check_bandwidth(self.bandwidth_bytes_per_s, f"NIC {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: how many devices (processes) it has, and its network cards.

    nics: the Ethernet card that reaches the master, or the default route, stands before other Ethernet cards.
    ranks: the global ranks that the launcher put here; None where they are assigned in the order of the file.
    """

    name: str
    devices: int
    nics: tuple[Nic, ...] = ()
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise ConfigurationError(f"host {self.name!r}: devices={self.devices!r}; write a whole number, at least 1")
        check_unique([nic.name for nic in self.nics], f"NICs of host {self.name!r}")
        if self.ranks is not None and (len(self.ranks) != self.devices or min(self.ranks) < 0):
            raise ConfigurationError(
                f"host {self.name!r}: ranks {list(self.ranks)}; write {self.devices} ranks of 0 or more, one a device"
            )

    def nic_of(self, kind: str, fabric: str | None = None) -> Nic | None:
        """The first NIC of this kind (and fabric, if given) that is up."""
        for nic in self.nics:
            if nic.kind == kind and nic.up and fabric in (None, nic.fabric):
                return nic
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between two clusters, named by the clusters at its ends. It counts in both directions."""

    ends: tuple[str, str]
    transport: TransportKind
    bandwidth_bytes_per_s: float
    latency_s: float
    measured: bool = False

    def __post_init__(self) -> None:
        check_kind(self.transport, f"transport of link {self.ends}")
        check_bandwidth(self.bandwidth_bytes_per_s, f"link {self.ends}")
        check_latency(self.latency_s, f"link {self.ends}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """How fast two hosts of one cluster reach each other on one transport.

    Attributes:
        bandwidth_bytes_per_s: one way. Measured by one TCP connection over the NICs' interfaces, or stated.
        latency_s: one way; None if not measured.
        nic_bytes_per_s: the rate that the slower NIC of the two states. RDMA can reach it where TCP does not.
    """

    transport: TransportKind
    bandwidth_bytes_per_s: float
    latency_s: float | None = None
    nic_bytes_per_s: float | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        check_kind(self.transport, "transport of a cluster's speed")
        check_bandwidth(self.bandwidth_bytes_per_s, f"speed on {self.transport}")
        if self.nic_bytes_per_s is not None:
            check_bandwidth(self.nic_bytes_per_s, f"NIC rate on {self.transport}")
        if self.latency_s is not None:
            check_latency(self.latency_s, f"speed on {self.transport}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Two hosts that should reach each other over a transport and did not, with what happened."""

    ends: tuple[str, str]  # hosts
    transport: TransportKind
    reason: str

    def __post_init__(self) -> None:
        check_kind(self.transport, f"transport of {self.ends}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts that share a fast network.

    Attributes:
        fabric: the kind of that network; None where it is not known.
        fallback: why not all hosts can use the fabric now (a NIC is down), or None. Groups with such a host
            use Ethernet.
        speeds: what two of its hosts reach, one entry a transport.
    """

    name: str
    hosts: tuple[Host, ...]
    fabric: TransportKind | None = None
    fallback: str | None = None
    speeds: tuple[LinkSpeed, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigurationError(f"cluster {self.name!r} has no hosts; give it at least one")
        if self.fabric is not None:
            check_kind(self.fabric, f"fabric of cluster {self.name!r}")
        check_unique([speed.transport for speed in self.speeds], f"speeds of cluster {self.name!r}")

    @property
    def num_devices(self) -> int:
        """Devices of all its hosts."""
        return sum(host.devices for host in self.hosts)

    def speed(self, transport: str) -> LinkSpeed | None:
        """The speed on one transport, if it is known."""
        return next((speed for speed in self.speeds if speed.transport == transport), None)


def check_kind(kind: str, what: str) -> None:
    """Raise ConfigurationError unless kind is one of TRANSPORT_KINDS."""
    if kind not in TRANSPORT_KINDS:
        raise ConfigurationError(f"{what} is {kind!r}; allowed: {', '.join(TRANSPORT_KINDS)}")


def check_bandwidth(value: float, what: str) -> None:
    """Raise ConfigurationError unless value is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{what}: bandwidth_bytes_per_s={value!r}; write a positive, finite number")


def check_latency(value: float, what: str) -> None:
    """Raise ConfigurationError unless value is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{what}: latency_s={value!r}; write zero or more seconds")


def check_unique(names: Sequence[str], what: str) -> None:
    """Raise ConfigurationError that names what stands twice."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigurationError(f"{what}: every name may stand once, but repeated: {', '.join(repeated)}")
