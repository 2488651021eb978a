"""Routes: which network cards lie between two devices of a topology, and how fast they are.

It reads the speeds of a topology. The caller counts how many transfers share a card.

    network = Network(topology, local_bytes_per_s=300e9)
    network.between_hosts(0, 5).bytes_per_s      # hosts by index, in the order of the topology
    network.group([0, 1, 2]).transport           # "infiniband" if all three share it, else "ethernet"

transport.py decides which cards hosts use, for planner and run alike: an RDMA fabric that all of them are on, else Ethernet. Between
clusters, all hosts share the link of that transport; if no link is given, each pair of hosts is assumed to have the rate of its own
cards, and link_notes says so. The rates of
RDMA cards of one kind add up, except with sockets; of a host's Ethernet cards only one is used.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_holmes.cluster.topology import Host, Link, Nic, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import check_number
from lightning_holmes.plan.transport import RDMA, TransportChooser, UsedCards

LOCAL = "local"
# One-way latency between two hosts if the topology does not give it; typical figures, not measured here.
DEFAULT_LATENCY_S = {"infiniband": 3e-6, "roce": 5e-6, "ethernet": 30e-6, "between clusters": 100e-6}

SOCKETS = 1448 / 1514
"""The share of the stated rate that TCP over Ethernet can use, with frames of 1500 bytes."""

REACHED = {"infiniband": 0.9, "roce": 0.84, "ethernet": SOCKETS}
"""The share of the stated rate that NCCL reaches. InfiniBand: calculon's a100_80g.json, for its network between hosts. RoCE: the same,
reduced for its longer headers: with Ethernet frames of 1500 bytes, the payload is 1024 bytes of 1110 instead of 4096 of 4146."""


_LINK_EXAMPLE = "transport: ethernet, bandwidth: 25 Gbit/s, latency: 50 us"


@dataclass(frozen=True, slots=True)
class Channel:
    """The connection from one host to another, one way.

    Attributes:
        card_bytes_per_s: of the slowest of the hosts' cards.
        links: between clusters, (indices of two clusters, bytes/s one way), which all of their hosts share.
    """

    transport: str
    card_bytes_per_s: float
    latency_s: float
    links: tuple[tuple[tuple[int, int], float], ...] = ()

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s of the slowest part, if there are no other transfers."""
        return min([self.card_bytes_per_s, *(rate for _, rate in self.links)])


class Network:
    """The speeds of a topology.

    Args:
        local_bytes_per_s: one way between two devices of one host; one number, or one for each cluster.
        efficiency: the share of the stated bandwidth of network cards and links that transfers reach; one number, or by kind.
        sockets: transfers use sockets instead of RDMA (gloo); measured speeds then apply to RDMA cards, too.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        local_bytes_per_s: float | Sequence[float],
        local_latency_s: float = 5e-6,
        efficiency: float | Mapping[str, float] = 1.0,
        sockets: bool = False,
    ) -> None:
        self.topology = topology
        shares = efficiency if isinstance(efficiency, Mapping) else dict.fromkeys((*RDMA, "ethernet"), efficiency)
        self.efficiency = {
            kind: check_number(s, "the network's efficiency", positive=True) for kind, s in shares.items()
        }
        self.sockets = sockets
        rates = [local_bytes_per_s] if isinstance(local_bytes_per_s, int | float) else list(local_bytes_per_s)
        rates *= len(topology.clusters) if len(rates) == 1 else 1
        assert len(rates) == len(topology.clusters), (rates, len(topology.clusters))
        latency_s = check_number(local_latency_s, "local_latency_s")
        self._local = [Channel(LOCAL, check_number(r, "local_bytes_per_s", positive=True), latency_s) for r in rates]
        self.hosts: list[Host] = [host for cluster in topology.clusters for host in cluster.hosts]
        self.cluster_of_host = [i for i, cluster in enumerate(topology.clusters) for _ in cluster.hosts]
        self.host_of_device = [index for index, host in enumerate(self.hosts) for _ in range(host.devices)]
        self._cards = TransportChooser(topology, sockets=sockets)
        self._links = {frozenset(link.ends): link for link in topology.links}
        self._known: dict[tuple[int, int], Channel] = {}

    @classmethod
    def of_devices(cls, topology: Topology, devices: Sequence[DeviceType], **settings: Any) -> Network:
        """The network of hosts with these devices: inside a host it is as fast as the slowest devices of the host's cluster."""
        of_host = iter(devices)
        local = [min(next(of_host).local_bytes_per_s for _ in cluster.hosts) for cluster in topology.clusters]
        latency_s = max(device.local_latency_s for device in devices)
        return cls(topology, local_bytes_per_s=local, local_latency_s=latency_s, **settings)

    def between_hosts(self, first: int, second: int) -> Channel:
        """The connection between two hosts (indices in the order of the topology).

        Raises:
            ConfigurationError: a speed is not known; the message names the host, the card or the link, and what to write.
        """
        if first == second:
            return self._local[self.cluster_of_host[first]]
        key = (min(first, second), max(first, second))
        if key not in self._known:
            self._known[key] = self.group(key)
        return self._known[key]

    def local_of(self, hosts: Sequence[int]) -> Channel:
        """The connection between two devices of one host, for the slowest of these hosts."""
        ways = [self._local[cluster] for cluster in {self.cluster_of_host[host] for host in hosts}]
        return min(ways, key=lambda way: way.card_bytes_per_s)

    def group(self, hosts: Sequence[int]) -> Channel:
        """The speed of a collective over these hosts: one transport for all, and the rate of its slowest pair."""
        distinct = sorted(set(hosts))
        if len(distinct) == 1:
            return self.local_of(distinct)
        used = self._cards.used_by(distinct)
        members = Counter(self.cluster_of_host[host] for host in distinct)
        if len(members) == 1:
            rate = min(self._used_rate(host, used) for host in distinct)
            return Channel(used.kind, rate, self._latency(distinct[0], used.kind))
        clusters = sorted(members)
        ring = zip(clusters, [*clusters[1:], clusters[0]], strict=True)
        links = {ends: self._link(ends, used.kind) for ends in sorted({(min(ends), max(ends)) for ends in ring})}
        bare = {cluster for ends, link in links.items() if link is None for cluster in ends}
        rates = []
        for host in distinct:
            cluster = self.cluster_of_host[host]
            is_known = used.kind != "ethernet" or self.topology.clusters[cluster].speed("ethernet") is not None
            if is_known or ((main := self._cards.main_card(host)) and main.bandwidth_bytes_per_s is not None):
                rates.append(self._used_rate(host, used))
            elif cluster in bare:
                raise self._unknown_way(next(ends for ends, link in links.items() if link is None and cluster in ends))
            elif members[cluster] > 1 and host in used.nics:
                # raises an error that names what is missing inside the cluster
                rates.append(self._used_rate(host, used))
        known = {ends: link for ends, link in links.items() if link is not None}
        latencies = [link.latency_s for link in known.values()]
        if bare and used.kind == "ethernet":
            latencies.append(DEFAULT_LATENCY_S["between clusters"])
        elif bare:
            latencies += [self._latency(host, used.kind) for host in distinct]
        lines = tuple(
            (ends, link.bandwidth_bytes_per_s * (1.0 if link.measured else self.efficiency[used.kind]))
            for ends, link in known.items()
        )
        return Channel(used.kind, min([*rates, *(rate for _, rate in lines)]), max(latencies), lines)

    def _link(self, ends: tuple[int, int], kind: str) -> Link | None:
        """The topology's link between two clusters for this transport, if there is one."""
        link = self._links.get(frozenset(self._names(ends)))
        return None if link is None or link.transport != kind else link

    def _names(self, ends: tuple[int, int]) -> list[str]:
        return [self.topology.clusters[end].name for end in ends]

    def _unknown_way(self, ends: tuple[int, int]) -> ConfigurationError:
        names = self._names(ends)
        link = self._links.get(frozenset(names))
        other = (
            "" if link is None else f" by ethernet, which their groups use: no {link.transport} fabric has all hosts"
        )
        return ConfigurationError(
            f"nothing is known about the way between the clusters {names[0]!r} and {names[1]!r}{other}; "
            f"{'add to' if link is None else 'write in'} {self.topology.described}, "
            f"under links: - {{ends: [{names[0]}, {names[1]}], {_LINK_EXAMPLE}}}"
        )

    def link_notes(self) -> tuple[str, ...]:
        """A line if it is not known what all hosts of two clusters have together, so that each pair of hosts is taken to have a line of its own."""
        hosts_of: list[list[int]] = [[] for _ in self.topology.clusters]
        for host, cluster in enumerate(self.cluster_of_host):
            hosts_of[cluster].append(host)
        open_ends = []
        for ends in itertools.combinations(range(len(hosts_of)), 2):
            is_alone = max(len(hosts_of[end]) for end in ends) == 1
            is_known = self._link(ends, "ethernet") is not None
            if not (is_known or is_alone or self._cards.shared([host for end in ends for host in hosts_of[end]])):
                open_ends.append(" - ".join(self._names(ends)))
        if not open_ends:
            return ()
        more = f" (and {len(open_ends) - 1} more)" if len(open_ends) > 1 else ""
        return (
            f"link {open_ends[0]}{more}: each pair of hosts is taken to have its own; a step takes longer than predicted if they share a "
            f"line: then state its bandwidth, as {_LINK_EXAMPLE}, in the topology file",
        )

    def ethernet_bytes_per_s(self, host: int) -> float:
        """Bytes/s, one way, of the Ethernet card by which a host reaches other clusters.

        Raises:
            ConfigurationError: the rate is not known.
        """
        main = self._cards.main_card(host)
        return self._rate(host, "ethernet", () if main is None else (main,))

    def _used_rate(self, host: int, used: UsedCards) -> float:
        """Bytes/s, one way, of the cards that a host uses in a group."""
        if used.kind == "ethernet" or self.sockets:
            return self._rate(host, used.kind, (used.nics[host],) if host in used.nics else ())
        return self._rate(host, used.kind, used.rails[host])

    def _rate(self, host: int, kind: str, cards: Sequence[Nic]) -> float:
        """Bytes/s, one way, of these cards of a host, all together.

        The rate of sockets was measured over the first usable card of a host, and applies to that card alone.
        """
        cluster = self.topology.clusters[self.cluster_of_host[host]]
        measured = cluster.speed(kind)
        if (
            measured is not None
            and measured.measured
            and (kind == "ethernet" or self.sockets)
            and list(cards) == list(self._cards.usable(host, kind)[:1])
        ):
            return measured.bandwidth_bytes_per_s
        rates = [nic.bandwidth_bytes_per_s for nic in cards]
        if rates and None not in rates:
            return self.efficiency[kind] * sum(rate for rate in rates if rate is not None)
        if measured is not None:
            return self.efficiency[kind] * (measured.nic_bytes_per_s or measured.bandwidth_bytes_per_s)
        name = self.hosts[host].name
        if not cards:
            raise ConfigurationError(
                f"the links inside cluster {cluster.name!r} have no known speed: host {name!r} has no {kind} card that "
                f"is up; add to {self.topology.described}, at that host: nics: [{{name: eth0, kind: {kind}, "
                "bandwidth: 25 Gbit/s}]"
            )
        unknown = next(nic.name for nic in cards if nic.bandwidth_bytes_per_s is None)
        raise ConfigurationError(
            f"the links inside cluster {cluster.name!r} have no known speed: NIC {unknown!r} ({kind}) of host {name!r} "
            f"has no bandwidth; add it to {self.topology.described}, for example bandwidth: 200 Gbit/s"
        )

    def _latency(self, host: int, kind: str) -> float:
        measured = self.topology.clusters[self.cluster_of_host[host]].speed(kind)
        if measured is not None and measured.latency_s is not None:
            return measured.latency_s
        return DEFAULT_LATENCY_S[kind]
