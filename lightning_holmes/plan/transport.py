"""Which network card each group of ranks uses. Pure: a topology in, a choice with its reason out.

A group whose hosts share one RDMA fabric uses it; any other group uses Ethernet (Holmes, arXiv 2312.03549, automatic
NIC selection). InfiniBand and RoCE cannot talk to each other, and a card that is down is none.

    chooser = TransportChooser(topology)
    choice = chooser.choose((0, 1, 4, 5))
    choice.kind, choice.nic_of(4), choice.reason      # "infiniband", Nic(name="mlx5_0", ...), "..."
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology

GroupTransportKind = Literal["local", "infiniband", "roce", "ethernet"]
_RDMA: tuple[Literal["infiniband"], Literal["roce"]] = ("infiniband", "roce")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """What a group uses and why.

    Attributes:
        kind: "local" for ranks of one host.
        nics: by rank: the card it uses; ranks are left out where none is known.
        reason: in one line.
        rails: by rank, where it is RDMA: all cards of the kind on fabrics that all hosts share. NCCL takes those near a GPU.
        fallback: the group stays inside a fabric, but a card is down.
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
        """Whether the group has an RDMA fabric of its own."""
        return self.kind in _RDMA


class TransportChooser:
    """Chooses for any group of the ranks of ``topology``.

    ``sockets``: groups use the cards by sockets (gloo does), which needs an interface with an address behind each.
    """

    def __init__(self, topology: Topology, *, sockets: bool = False) -> None:
        self._places = topology.places()
        self._sockets = sockets

    def without(self, down: Collection[tuple[str, str]] | None) -> TransportChooser:
        """One that takes these fast cards, host and name, to be down; None: all."""
        made = copy.copy(self)
        made._places = [
            (
                cluster,
                replace(
                    host,
                    nics=tuple(
                        replace(nic, up=False)
                        if nic.kind in _RDMA and (down is None or (host.name, nic.name) in down)
                        else nic
                        for nic in host.nics
                    ),
                ),
            )
            for cluster, host in self._places
        ]
        return made

    def choose(self, ranks: Sequence[int]) -> TransportChoice:
        """The best card that all ``ranks`` share."""
        places = {rank: self._places[rank] for rank in ranks}
        hosts = {host.name: (cluster, host) for cluster, host in places.values()}
        if len(hosts) == 1:
            (_, host), *_ = hosts.values()
            main = host.nic_of("ethernet")
            return TransportChoice(
                kind="local", nics={} if main is None else dict.fromkeys(ranks, main), reason=f"all on host {host.name}"
            )
        shared = self._shared_rdma(list(hosts.values()))
        if shared:
            best = max(shared, key=lambda option: (option.slowest, option.kind == "infiniband", option.fabric))
            alike = [option for option in shared if option.kind == best.kind]
            return TransportChoice(
                kind=best.kind,
                nics={rank: best.nics[host.name] for rank, (_, host) in places.items()},
                reason=f"{len(hosts)} hosts share it" + (f" ({best.fabric})" if best.fabric else ""),
                rails={rank: _rails(host, alike) for rank, (_, host) in places.items()},
                has_rdma=True,
            )
        inside = len({cluster.name for cluster, _ in hosts.values()}) == 1
        cards = _ethernet([host for _, host in hosts.values()], inside=inside)
        down = _down_cards(list(hosts.values())) if inside else []
        return TransportChoice(
            kind="ethernet",
            nics={rank: cards[host.name] for rank, (_, host) in places.items() if host.name in cards},
            reason="; ".join(down[:3]) if down else self._why_ethernet(list(hosts.values())),
            fallback=bool(down),
            has_rdma=any(nic.kind in _RDMA and nic.up for _, host in hosts.values() for nic in host.nics),
        )

    def _why_ethernet(self, places: Sequence[tuple[Cluster, Host]]) -> str:
        """Why no RDMA fabric serves these hosts."""
        kinds: dict[str, set[str]] = {}
        for cluster, host in places:
            for nic in host.nics:
                if nic.kind in _RDMA and nic.up:
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
            nic.kind in _RDMA and nic.up and not nic.addresses for _, h in places for nic in h.nics
        ):
            return "the RDMA cards have no IP address, which sockets need"
        return "not all hosts have a card on one fabric"

    def host(self, rank: int) -> Host:
        """The host of a rank."""
        return self._places[rank][1]

    def reaching(self, rank: int, ranks: Sequence[int]) -> tuple[Nic, ...]:
        """The working cards of the rank's host over which it reaches the hosts of ``ranks``: Ethernet, and those of fabrics
        that all of them share."""
        places = [self._places[other] for other in ranks]
        shared = self._shared_rdma(list({host.name: (cluster, host) for cluster, host in places}.values()))
        fabrics = {(option.kind, option.fabric) for option in shared}
        return tuple(
            nic
            for nic in self.host(rank).nics
            if nic.up and (nic.kind == "ethernet" or (nic.kind, nic.fabric or "") in fabrics)
        )

    def main_nic(self, rank: int) -> Nic | None:
        """The Ethernet card of the rank's host that reaches the master."""
        return self._places[rank][1].nic_of("ethernet")

    def _shared_rdma(self, places: list[tuple[Cluster, Host]]) -> list[_Shared]:
        """Every RDMA fabric that all hosts have a working card of."""
        found: list[_Shared] = []
        same_cluster = len({cluster.name for cluster, _ in places}) == 1
        first = places[0][1]
        for nic in first.nics:
            if nic.kind not in _RDMA or not nic.up:
                continue
            if any(option.kind == nic.kind and option.fabric == (nic.fabric or "") for option in found):
                continue  # another card on the same fabric
            # a card of unknown fabric, from a file written by hand, shares that of its cluster
            if nic.fabric is None and not same_cluster:
                continue
            cards = {host.name: host.nic_of(nic.kind, nic.fabric) for _, host in places}
            if self._sockets and any(card is None or not card.addresses for card in cards.values()):
                continue
            if all(card is not None for card in cards.values()):
                found.append(
                    _Shared(
                        kind=nic.kind, fabric=nic.fabric or "", nics={k: v for k, v in cards.items() if v is not None}
                    )
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A fabric that several hosts have cards of."""

    kind: Literal["infiniband", "roce"]
    fabric: str
    nics: Mapping[str, Nic]

    @property
    def slowest(self) -> float:
        return _slowest(self.nics)


def _slowest(nics: Mapping[str, Nic]) -> float:
    return min(nic.bandwidth_bytes_per_s or 0.0 for nic in nics.values())


def _rails(host: Host, shared: Sequence[_Shared]) -> tuple[Nic, ...]:
    """The working cards of a host on any of the shared fabrics."""
    fabrics = {option.fabric for option in shared}
    kind = shared[0].kind
    return tuple(nic for nic in host.nics if nic.kind == kind and nic.up and (nic.fabric or "") in fabrics)


def _ethernet(hosts: Sequence[Host], *, inside: bool) -> dict[str, Nic]:
    """The Ethernet cards that reach the master; ``inside`` a cluster the fastest in a subnet that all hosts are in.

    Between clusters a subnet says nothing: two sites may both call theirs 192.168.1.0/24.
    """
    main = {host.name: card for host in hosts if (card := host.nic_of("ethernet")) is not None}
    if len(main) < len(hosts):
        return main
    options = [main]
    for nic in hosts[0].nics if inside else ():
        if nic.kind == "ethernet" and nic.up and nic.fabric is not None:
            cards = {host.name: card for host in hosts if (card := host.nic_of("ethernet", nic.fabric)) is not None}
            if len(cards) == len(hosts):
                options.append(cards)
    return max(options, key=_slowest)


def _down_cards(places: Sequence[tuple[Cluster, Host]]) -> list[str]:
    """Why hosts of one cluster cannot use its fabric: what is down on those that have no working card of its kind."""
    kinds = [kind for kind in _RDMA if all(any(nic.kind == kind for nic in host.nics) for _, host in places)]
    return [
        f"{nic.name} of {host.name} is down"
        for kind in kinds[:1]
        for _, host in places
        if host.nic_of(kind) is None
        for nic in host.nics
        if nic.kind == kind
    ]
