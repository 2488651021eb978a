"""Chooses the network cards of a group, with a reason, from a topology, for a run's process groups and the planner (route.py) alike. Pure.

A group whose hosts share an RDMA fabric, on which all of them have a working card, uses it: of several, the one whose slowest card is the
fastest. Any other group uses Ethernet (Holmes, arXiv 2312.03549, automatic NIC selection): the first card of each host; with sockets,
inside a cluster, the cards of the fastest subnet that all hosts are in. InfiniBand and RoCE cannot talk to each other.

    chooser = TransportChooser(topology)
    choice = chooser.choose((0, 1, 4, 5))             # ranks
    choice.kind, choice.nic_of(4), choice.reason      # "infiniband", Nic(name="mlx5_0", ...), "..."
    chooser.used_by([0, 2]).rails[2]                  # hosts by index: (Nic(name="mlx5_0", ...), ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_holmes.cluster.network import Cluster, Host, Nic, fabric_of
from lightning_holmes.cluster.topology import Topology

Rdma = Literal["infiniband", "roce"]
RDMA: tuple[Rdma, ...] = ("infiniband", "roce")
Fabric = tuple[Rdma, str]
"""An RDMA fabric: its kind and name."""
GroupTransportKind = Literal["local", "infiniband", "roce", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedCards:
    """The cards that a group of hosts uses, by host index.

    Attributes:
        nics: the card that a host uses with sockets or on Ethernet; hosts without any Ethernet card are left out.
        rails: all of a host's cards of this kind on fabrics that all the hosts share; empty on Ethernet. NCCL uses those near a GPU.
        fabric: the name of the fabric of ``nics``; None on Ethernet.
    """

    kind: Literal["infiniband", "roce", "ethernet"]
    nics: Mapping[int, Nic]
    rails: Mapping[int, tuple[Nic, ...]]
    fabric: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """The transport of a group, and the reason.

    Attributes:
        kind: "local" for ranks of one host.
        nics: by rank, the card it uses; ranks without a known card are left out.
        reason: in one line.
        rails: by rank, for RDMA: all cards of the kind on fabrics that all hosts share. NCCL uses those near a GPU.
        fallback: whether a group inside one cluster uses Ethernet because an RDMA card is down.
        has_rdma: whether any of the hosts has a working RDMA card.
    """

    kind: GroupTransportKind
    nics: Mapping[int, Nic]
    reason: str
    rails: Mapping[int, tuple[Nic, ...]] = field(default_factory=dict)
    fallback: bool = False
    has_rdma: bool = False

    def nic_of(self, rank: int) -> Nic | None:
        """The card that ``rank`` uses in this group, if one is known."""
        return self.nics.get(rank)

    @property
    def is_rdma(self) -> bool:
        """Whether the group uses an RDMA fabric."""
        return self.kind in RDMA


class TransportChooser:
    """Chooses the transport for any group of the ranks of ``topology``, or of its hosts, by index in the order of the topology.

    Args:
        sockets: every group opens its own sockets (gloo), on RDMA cards, too, so that a card needs an IP address. Without it (NCCL), all
            groups of a process use one Ethernet card, the first one, since NCCL reads that choice once per process.
    """

    def __init__(self, topology: Topology, *, sockets: bool = False) -> None:
        self._sockets = sockets
        self._hosts = [(cluster, host) for cluster in topology.clusters for host in cluster.hosts]
        index = {host.name: i for i, (_, host) in enumerate(self._hosts)}
        self._host_of_rank = [index[host.name] for _, host in topology.places()]
        self._rdma: list[list[tuple[Fabric, Nic]]] = [
            [
                ((nic.kind, fabric_of(nic, cluster.name)), nic)
                for nic in host.nics
                if nic.kind != "ethernet" and nic.up and (nic.addresses or not sockets)
            ]
            for cluster, host in self._hosts
        ]
        # the first of several cards on a fabric
        self._first: list[dict[Fabric, Nic]] = [dict(reversed(cards)) for cards in self._rdma]

    def shared(self, hosts: Sequence[int]) -> frozenset[Fabric]:
        """The RDMA fabrics on which all of these hosts have a usable card."""
        first, *others = hosts
        return frozenset(self._first[first]).intersection(*(self._first[host] for host in others))

    def used_by(self, hosts: Sequence[int]) -> UsedCards:
        """The cards that two or more hosts use for a group."""
        fabrics = self.shared(hosts)
        if not fabrics:
            return UsedCards(kind="ethernet", nics=self._ethernet(hosts), rails={})
        nics = {fabric: {host: self._first[host][fabric] for host in hosts} for fabric in fabrics}
        best = max(fabrics, key=lambda fabric: (_slowest(nics[fabric]), fabric[0] == "infiniband", fabric[1]))
        alike = {fabric for fabric in fabrics if fabric[0] == best[0]}
        rails = {host: tuple(nic for fabric, nic in self._rdma[host] if fabric in alike) for host in hosts}
        return UsedCards(kind=best[0], nics=nics[best], rails=rails, fabric=best[1])

    def usable(self, host: int, kind: str) -> tuple[Nic, ...]:
        """The cards of a kind that a host can use."""
        if kind == "ethernet":
            return tuple(nic for nic in self._hosts[host][1].nics if nic.kind == "ethernet" and nic.up)
        return tuple(nic for (own, _), nic in self._rdma[host] if own == kind)

    def main_card(self, host: int) -> Nic | None:
        """The Ethernet card of a host that reaches the master."""
        return self._hosts[host][1].nic_of("ethernet")

    def _ethernet(self, hosts: Sequence[int]) -> dict[int, Nic]:
        """The Ethernet cards that reach the master; with sockets inside a cluster, those of a subnet with all hosts if it is faster.

        Subnets are not compared between clusters: two sites may both use 192.168.1.0/24.
        """
        main = {host: nic for host in hosts if (nic := self.main_card(host)) is not None}
        apart = len({self._hosts[host][0].name for host in hosts}) > 1
        if not self._sockets or apart or len(main) < len(hosts):
            return main
        of_hosts = [reversed(self.usable(host, "ethernet")) for host in hosts]
        subnets = [{nic.fabric: nic for nic in cards if nic.fabric is not None} for cards in of_hosts]
        options = [
            {host: own[name] for host, own in zip(hosts, subnets, strict=True)}
            for name in sorted(set(subnets[0]).intersection(*subnets[1:]))
        ]
        return max((main, *options), key=_slowest)

    def choose(self, ranks: Sequence[int]) -> TransportChoice:
        """Choose the best transport that all ``ranks`` share."""
        host_of = {rank: self._host_of_rank[rank] for rank in ranks}
        hosts = sorted(set(host_of.values()))
        if len(hosts) == 1:
            main = self.main_card(hosts[0])
            return TransportChoice(
                kind="local",
                nics={} if main is None else dict.fromkeys(ranks, main),
                reason=f"all on host {self._hosts[hosts[0]][1].name}",
            )
        used = self.used_by(hosts)
        nics = {rank: used.nics[host] for rank, host in host_of.items() if host in used.nics}
        if used.kind != "ethernet":
            return TransportChoice(
                kind=used.kind,
                nics=nics,
                reason=f"{len(hosts)} hosts share it ({used.fabric})",
                rails={rank: used.rails[host] for rank, host in host_of.items()},
                has_rdma=True,
            )
        places = [self._hosts[host] for host in hosts]
        inside = len({cluster.name for cluster, _ in places}) == 1
        down = _down_cards(places) if inside else []
        return TransportChoice(
            kind="ethernet",
            nics=nics,
            reason="; ".join(down[:3]) if down else self._why_ethernet(places),
            fallback=bool(down),
            has_rdma=any(nic.kind in RDMA and nic.up for _, host in places for nic in host.nics),
        )

    def _why_ethernet(self, places: Sequence[tuple[Cluster, Host]]) -> str:
        """The reason why no RDMA fabric connects these hosts."""
        kinds: dict[str, set[str]] = {}
        for cluster, host in places:
            for nic in host.nics:
                if nic.kind in RDMA and nic.up:
                    kinds.setdefault(nic.kind, set()).add(cluster.name)
        clusters = {cluster.name for cluster, _ in places}
        if not kinds:
            return "no RDMA card is known on these hosts"
        if len(kinds) == 2 and len(clusters) > 1:
            return "crosses from " + " to ".join(f"{kind} in {'+'.join(sorted(n))}" for kind, n in kinds.items())
        if len(clusters) > 1:
            return f"crosses the clusters {', '.join(sorted(clusters))}, which share no fabric"
        fallback = next((cluster.fallback for cluster, _ in places if cluster.fallback is not None), None)
        if fallback is not None:
            return fallback
        if self._sockets and any(
            nic.kind in RDMA and nic.up and not nic.addresses for _, h in places for nic in h.nics
        ):
            return "the RDMA cards have no IP address, which sockets need"
        return "not all hosts have a card on one fabric"

    def host(self, rank: int) -> Host:
        """The host of a rank."""
        return self._hosts[self._host_of_rank[rank]][1]

    def reaching(self, rank: int, ranks: Sequence[int]) -> tuple[Nic, ...]:
        """The working cards of the rank's host over which it reaches the hosts of ``ranks``: Ethernet cards, and RDMA cards on
        fabrics that all of these hosts share."""
        shared = self.shared(sorted({self._host_of_rank[other] for other in ranks}))
        cluster, host = self._hosts[self._host_of_rank[rank]]
        return tuple(
            nic
            for nic in host.nics
            if nic.up and (nic.kind == "ethernet" or (nic.kind, fabric_of(nic, cluster.name)) in shared)
        )

    def main_nic(self, rank: int) -> Nic | None:
        """The Ethernet card of the rank's host that reaches the master."""
        return self.main_card(self._host_of_rank[rank])


def _down_cards(places: Sequence[tuple[Cluster, Host]]) -> list[str]:
    """Messages for the RDMA cards that are down, on hosts of one cluster without another working card of that kind."""
    kinds = [kind for kind in RDMA if all(any(nic.kind == kind for nic in host.nics) for _, host in places)]
    return [
        f"{nic.name} of {host.name} is down"
        for kind in kinds[:1]
        for _, host in places
        if host.nic_of(kind) is None
        for nic in host.nics
        if nic.kind == kind
    ]


def _slowest(nics: Mapping[int, Nic]) -> float:
    return min(nic.bandwidth_bytes_per_s or 0.0 for nic in nics.values())
