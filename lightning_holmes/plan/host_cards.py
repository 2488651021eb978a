"""HostCards: which network cards hosts use together. Its answer is that of a run's groups (transport.py) and of the planner (route.py).

It owns what cards have in common, by their fabrics. Ranks are transport.py's, speeds route.py's.

    cards = HostCards([(cluster, host) for cluster in topology.clusters for host in cluster.hosts])
    used = cards.used_by([0, 2])                     # hosts by index; their order does not matter
    used.kind, used.nics[0].name, used.rails[2]      # "infiniband", "mlx5_0", (Nic(name="mlx5_0", ...), ...)

Hosts use the RDMA fabric on which all of them have a working card: the one whose slowest card is the fastest. Others use Ethernet:
the first card of each host; by sockets, inside a cluster, those of the fastest subnet that all are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_holmes.cluster.network import Cluster, Host, Nic, fabric_of

Rdma = Literal["infiniband", "roce"]
RDMA: tuple[Rdma, ...] = ("infiniband", "roce")
Fabric = tuple[Rdma, str]
"""Its kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedCards:
    """The cards of a group of hosts, by the hosts' indices.

    Attributes:
        nics: the card that a host uses by sockets or on Ethernet; hosts without any Ethernet card are left out.
        rails: all of a host's cards of this kind on fabrics that all of them share; empty on Ethernet. NCCL takes those near a GPU.
        fabric: the name of that of ``nics``; None on Ethernet.
    """

    kind: Literal["infiniband", "roce", "ethernet"]
    nics: Mapping[int, Nic]
    rails: Mapping[int, tuple[Nic, ...]]
    fabric: str | None = None


class HostCards:
    """The cards of hosts, each with its cluster.

    Args:
        sockets: each group has sockets of its own (gloo's), on RDMA cards, too, which needs an address on each. NCCL reads once a
            process which Ethernet card all groups use: the first one.
    """

    def __init__(self, places: Sequence[tuple[Cluster, Host]], *, sockets: bool = False) -> None:
        self._sockets = sockets
        self._hosts = [host for _, host in places]
        self._clusters = [cluster.name for cluster, _ in places]
        self._rdma: list[list[tuple[Fabric, Nic]]] = [
            [
                ((nic.kind, fabric_of(nic, cluster.name)), nic)
                for nic in host.nics
                if nic.kind != "ethernet" and nic.up and (nic.addresses or not sockets)
            ]
            for cluster, host in places
        ]
        # of several cards on a fabric the first
        self._first: list[dict[Fabric, Nic]] = [dict(reversed(cards)) for cards in self._rdma]

    def shared(self, hosts: Sequence[int]) -> frozenset[Fabric]:
        """The RDMA fabrics on which all of these hosts have a usable card."""
        first, *others = hosts
        return frozenset(self._first[first]).intersection(*(self._first[host] for host in others))

    def share_pairwise(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether each host of the first shares a fabric with each of the second."""
        ones, others = ({frozenset(self._first[host]) for host in hosts} for hosts in (first, second))
        return all(one & other for one in ones for other in others)

    def used_by(self, hosts: Sequence[int]) -> UsedCards:
        """What two or more hosts use together."""
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
            return tuple(nic for nic in self._hosts[host].nics if nic.kind == "ethernet" and nic.up)
        return tuple(nic for (own, _), nic in self._rdma[host] if own == kind)

    def main_nic(self, host: int) -> Nic | None:
        """The Ethernet card of a host that reaches the master."""
        return self._hosts[host].nic_of("ethernet")

    def _ethernet(self, hosts: Sequence[int]) -> dict[int, Nic]:
        """The Ethernet cards that reach the master; by sockets inside a cluster those of a subnet with all hosts, where that is faster.

        Between clusters a subnet says nothing: two sites may both call theirs 192.168.1.0/24.
        """
        main = {host: nic for host in hosts if (nic := self.main_nic(host)) is not None}
        apart = len({self._clusters[host] for host in hosts}) > 1
        if not self._sockets or apart or len(main) < len(hosts):
            return main
        subnets: list[dict[str, Nic]] = []
        for host in hosts:
            cards = [nic for nic in self._hosts[host].nics if nic.kind == "ethernet" and nic.up]
            subnets.append({nic.fabric: nic for nic in reversed(cards) if nic.fabric is not None})
        options = [
            {host: own[name] for host, own in zip(hosts, subnets, strict=True)}
            for name in sorted(set(subnets[0]).intersection(*subnets[1:]))
        ]
        return max((main, *options), key=_slowest)


def _slowest(nics: Mapping[int, Nic]) -> float:
    return min(nic.bandwidth_bytes_per_s or 0.0 for nic in nics.values())
