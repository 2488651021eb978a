"""Chooses the network card for each group of ranks, with a reason, from a topology. Pure. host_cards.py finds the cards that hosts
have in common, for planner and run alike.

A group whose hosts share one RDMA fabric uses it; any other group uses Ethernet (Holmes, arXiv 2312.03549, automatic
NIC selection). InfiniBand and RoCE cannot talk to each other, and a card that is down does not count.

    chooser = TransportChooser(topology)
    choice = chooser.choose((0, 1, 4, 5))
    choice.kind, choice.nic_of(4), choice.reason      # "infiniband", Nic(name="mlx5_0", ...), "..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_holmes.cluster.network import fabric_of
from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.plan.host_cards import RDMA, HostCards

GroupTransportKind = Literal["local", "infiniband", "roce", "ethernet"]


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
    """Chooses the transport for any group of the ranks of ``topology``.

    ``sockets``: groups use the cards through sockets (gloo), so that each card needs an interface with an IP address.
    """

    def __init__(self, topology: Topology, *, sockets: bool = False) -> None:
        self._sockets = sockets
        self._hosts = [(cluster, host) for cluster in topology.clusters for host in cluster.hosts]
        self._cards = HostCards(self._hosts, sockets=sockets)
        index = {host.name: i for i, (_, host) in enumerate(self._hosts)}
        self._host_of_rank = [index[host.name] for _, host in topology.places()]

    def choose(self, ranks: Sequence[int]) -> TransportChoice:
        """Choose the best transport that all ``ranks`` share."""
        host_of = {rank: self._host_of_rank[rank] for rank in ranks}
        hosts = sorted(set(host_of.values()))
        if len(hosts) == 1:
            main = self._cards.main_nic(hosts[0])
            return TransportChoice(
                kind="local",
                nics={} if main is None else dict.fromkeys(ranks, main),
                reason=f"all on host {self._hosts[hosts[0]][1].name}",
            )
        used = self._cards.used_by(hosts)
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
            return "crosses from " + " to ".join(
                f"{kind} in {'+'.join(sorted(names))}" for kind, names in kinds.items()
            )
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
        shared = self._cards.shared(sorted({self._host_of_rank[other] for other in ranks}))
        cluster, host = self._hosts[self._host_of_rank[rank]]
        return tuple(
            nic
            for nic in host.nics
            if nic.up and (nic.kind == "ethernet" or (nic.kind, fabric_of(nic, cluster.name)) in shared)
        )

    def main_nic(self, rank: int) -> Nic | None:
        """The Ethernet card of the rank's host that reaches the master."""
        return self._cards.main_nic(self._host_of_rank[rank])


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
