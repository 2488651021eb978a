"""Routes: which network cards lie between two devices of a topology, and how fast they are.

It owns the reading of a topology's speeds. Who shares a card is for the caller to count.

    network = Network(topology, local_bytes_per_s=300e9)
    network.between_hosts(0, 5).bytes_per_s      # hosts by index, in the order of the topology
    network.group([0, 1, 2]).transport           # "infiniband" if all three share it, else "ethernet"

Hosts whose working cards share an RDMA fabric use it, as a run's groups do (transport.py): in one cluster also cards of which no
fabric is known. Others use Ethernet. Hosts of different clusters use the clusters' link, which all of them share; where there is none, both hosts'
Ethernet cards. A link that was measured by one pair of hosts alone says nothing of several, and counts for each pair.
RDMA cards of one kind add up; of Ethernet cards the first is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_holmes.cluster.topology import Host, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.layer_cost import check_number

LOCAL = "local"
_RDMA = ("infiniband", "roce")
# One way between two hosts where a topology says nothing; typical figures, not measured here.
DEFAULT_LATENCY_S = {"infiniband": 3e-6, "roce": 5e-6, "ethernet": 30e-6, "between clusters": 100e-6}

SOCKETS = 1448 / 1514
"""What TCP over Ethernet leaves of the stated rate, with frames of 1500 bytes."""

REACHED = {"infiniband": 0.9, "roce": 0.84, "ethernet": SOCKETS}
"""Of the stated rate, by NCCL. InfiniBand: calculon's a100_80g.json, for its network between hosts. RoCE: that, less its longer
headers: 1024 bytes of 1110 where Ethernet's frames are of 1500, and not 4096 of 4146."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One way from a host to another.

    Attributes:
        card_bytes_per_s: of the hosts' cards, the slowest.
        links: between clusters, (two clusters by index, bytes/s one way): what all of their hosts share.
    """

    transport: str
    card_bytes_per_s: float
    latency_s: float
    links: tuple[tuple[tuple[int, int], float], ...] = ()

    @property
    def bytes_per_s(self) -> float:
        """Of its slowest part, where nobody else sends."""
        return min([self.card_bytes_per_s, *(rate for _, rate in self.links)])


class Network:
    """The speeds of a topology.

    Args:
        local_bytes_per_s: one way between two devices of one host; of all, or of each cluster's.
        efficiency: share of the stated bandwidth of network cards and links that transfers reach; of all, or by kind.
        sockets: transfers use sockets, not RDMA (gloo does): then measured speeds count for RDMA cards, too.
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
        shares = efficiency if isinstance(efficiency, Mapping) else dict.fromkeys((*_RDMA, "ethernet"), efficiency)
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
        self._links = {frozenset(link.ends): link for link in topology.links}
        self._known: dict[tuple[int, int], Channel] = {}

    def between_hosts(self, first: int, second: int) -> Channel:
        """The way between two hosts (indices in the order of the topology).

        Raises:
            ConfigurationError: a speed is not known; names the host, the card or the link, and what to write.
        """
        if first == second:
            return self._local[self.cluster_of_host[first]]
        key = (min(first, second), max(first, second))
        if key not in self._known:
            same = self.cluster_of_host[first] == self.cluster_of_host[second]
            self._known[key] = self.group(key) if same or self._shared_rdma(key) else self._across(*key)
        return self._known[key]

    def local_of(self, hosts: Sequence[int]) -> Channel:
        """Between two devices of one of these hosts, where it is slowest."""
        ways = [self._local[cluster] for cluster in {self.cluster_of_host[host] for host in hosts}]
        return min(ways, key=lambda way: way.card_bytes_per_s)

    def busiest_share(self, host: int, kind: str) -> float:
        """The share of what a host sends by a transport that the busiest of its cards carries: RDMA cards of one kind share
        it in proportion to their rates, by sockets and on Ethernet one card has all."""
        cards = [nic for nic in self.hosts[host].nics if nic.kind == kind and nic.up]
        if kind == "ethernet" or self.sockets or len(cards) < 2:
            return 1.0
        rates = [nic.bandwidth_bytes_per_s for nic in cards]
        known = [rate for rate in rates if rate is not None]
        return max(known) / sum(known) if len(known) == len(rates) else 1 / len(cards)

    def group(self, hosts: Sequence[int]) -> Channel:
        """What a collective over these hosts (each once) runs at: one transport for all, its slowest pair."""
        distinct = sorted(set(hosts))
        if len(distinct) == 1:
            return self.local_of(distinct)
        shared = self._shared_rdma(distinct)
        if shared is not None or len({self.cluster_of_host[host] for host in distinct}) == 1:
            kind, fabrics = shared or ("ethernet", None)
            rates = [self._rate(host, kind, fabrics) for host in distinct]
            return Channel(kind, min(rates), self._latency(distinct[0], kind))
        pairs = [
            self.between_hosts(host, other)
            for host, other in zip(distinct, [*distinct[1:], distinct[0]], strict=True)
            if self.cluster_of_host[host] != self.cluster_of_host[other]
        ]
        inside = [self._rate(host, "ethernet") for host in distinct if self.hosts[host].nic_of("ethernet") is not None]
        slowest = min(channel.card_bytes_per_s for channel in pairs)
        links = dict(link for channel in pairs for link in channel.links)
        latency_s = max(channel.latency_s for channel in pairs)
        return Channel("ethernet", min([slowest, *inside]), latency_s, tuple(links.items()))

    def _shared_rdma(self, hosts: Sequence[int]) -> tuple[str, frozenset[str | None]] | None:
        """The RDMA kind that a run's groups of these hosts use (transport.py), and the fabrics on which all of them are."""
        same = len({self.cluster_of_host[host] for host in hosts}) == 1
        found: list[tuple[float, bool, str, frozenset[str | None]]] = []
        for kind in _RDMA:
            cards = [
                [
                    nic
                    for nic in self.hosts[host].nics
                    if nic.kind == kind and nic.up and (nic.addresses or not self.sockets)
                ]
                for host in hosts
            ]
            # a card of unknown fabric, from a file written by hand, shares that of its cluster
            fabrics = frozenset.intersection(*(frozenset(nic.fabric for nic in own) for own in cards))
            fabrics = fabrics if same else fabrics - {None}
            rates = [
                min(next(nic.bandwidth_bytes_per_s or 0.0 for nic in own if nic.fabric == fabric) for own in cards)
                for fabric in fabrics
            ]
            if rates:
                found.append((max(rates), kind == "infiniband", kind, fabrics))
        return max(found)[2:] if found else None

    def _across(self, first: int, second: int) -> Channel:
        ends = self.cluster_of_host[first], self.cluster_of_host[second]
        names = [self.topology.clusters[end].name for end in ends]
        link = self._links.get(frozenset(names))
        kind = link.transport if link is not None else "ethernet"
        rates = [self._rate(host, kind) for host in (first, second) if self._stated(host, kind)]
        if link is not None:
            pair = link.bandwidth_bytes_per_s * (1.0 if link.measured else self.efficiency[kind])
            together = link.shared_bytes_per_s if link.measured else pair
            links = () if together is None else (((min(ends), max(ends)), together),)
            return Channel(kind, min([pair, *rates]), link.latency_s, links)
        if len(rates) < 2:
            raise ConfigurationError(
                f"nothing is known about the way between the clusters {names[0]!r} and {names[1]!r}; add to "
                f"{self.topology.described}, under links: - {{ends: [{names[0]}, {names[1]}], transport: ethernet, "
                "bandwidth: 25 Gbit/s, latency: 50 us}"
            )
        return Channel(kind, min(rates), DEFAULT_LATENCY_S["between clusters"])

    def link_notes(self) -> tuple[str, ...]:
        """A line for each link between clusters that counts for each pair of hosts, since one pair alone has measured it."""
        notes = []
        for link in self.topology.links:
            first, second = (
                [h for h, cluster in enumerate(self.cluster_of_host) if self.topology.clusters[cluster].name == name]
                for name in link.ends
            )
            users = max(len(first), len(second))
            if not link.measured or link.shared_bytes_per_s is not None or users == 1:
                continue
            if all(self._shared_rdma((one, other)) for one in first for other in second):
                continue  # a fabric reaches across
            notes.append(
                f"link {' - '.join(link.ends)}: measured by one pair of hosts, and taken to give each pair as much; shared by {users} "
                f"hosts if it is one line: then say so in the topology file: links: - {{ends: [{', '.join(link.ends)}], "
                f"transport: {link.transport}, bandwidth: {link.bandwidth_bytes_per_s * 8 / 1e9:.3g} Gbit/s, "
                f"latency: {link.latency_s * 1e6:.3g} us}}"
            )
        return tuple(notes)

    def ethernet_bytes_per_s(self, host: int) -> float:
        """One way, of a host's first Ethernet card.

        Raises:
            ConfigurationError: it is not known.
        """
        return self._rate(host, "ethernet")

    def _stated(self, host: int, kind: str) -> bool:
        measured = self.topology.clusters[self.cluster_of_host[host]].speed(kind)
        cards = [nic for nic in self.hosts[host].nics if nic.kind == kind and nic.up]
        return measured is not None or any(nic.bandwidth_bytes_per_s is not None for nic in cards)

    def _rate(self, host: int, kind: str, fabrics: frozenset[str | None] | None = None) -> float:
        """Bytes/s, one way, of a host's cards of a kind (on these fabrics), all of them together; by sockets of one."""
        cluster = self.topology.clusters[self.cluster_of_host[host]]
        measured = cluster.speed(kind)
        if measured is not None and measured.measured and (kind == "ethernet" or self.sockets):
            return measured.bandwidth_bytes_per_s
        cards = [nic for nic in self.hosts[host].nics if nic.kind == kind and nic.up]
        cards = cards if fabrics is None else [nic for nic in cards if nic.fabric in fabrics]
        if kind == "ethernet" or self.sockets:
            cards = cards[:1]
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
