"""HostCards: which network cards a group of hosts uses. Both a run's process groups (transport.py) and the planner (route.py) use it.

It finds the fabrics that hosts share. Ranks are handled in transport.py, speeds in route.py.

    cards = HostCards([(cluster, host) for cluster in topology.clusters for host in cluster.hosts])
    used = cards.used_by([0, 2])                     # hosts by index; their order does not matter
    used.kind, used.nics[0].name, used.rails[2]      # "infiniband", "mlx5_0", (Nic(name="mlx5_0", ...), ...)

Hosts use an RDMA fabric on which all of them have a working card: of several, the one whose slowest card is the fastest. Otherwise they
use Ethernet: the first card of each host; with sockets, inside a cluster, the cards of the fastest subnet that all hosts are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_holmes.cluster.network import Cluster, Host, Nic, fabric_of

Rdma = Literal["infiniband", "roce"]
RDMA: tuple[Rdma, ...] = ("infiniband", "roce")
Fabric = tuple[Rdma, str]
"""An RDMA fabric: its kind and name."""


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


class HostCards:
    """The network cards of hosts; each host is given with its cluster.

    Args:
        sockets: every group opens its own sockets (gloo), on RDMA cards, too, so that a card needs an IP address. Without it (NCCL), all
            groups of a process use one Ethernet card, the first one, since NCCL reads that choice once per process.
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
            return tuple(nic for nic in self._hosts[host].nics if nic.kind == "ethernet" and nic.up)
        return tuple(nic for (own, _), nic in self._rdma[host] if own == kind)

    def main_nic(self, host: int) -> Nic | None:
        """The Ethernet card of a host that reaches the master."""
        return self._hosts[host].nic_of("ethernet")

    def _ethernet(self, hosts: Sequence[int]) -> dict[int, Nic]:
        """The Ethernet cards that reach the master; with sockets inside a cluster, those of a subnet with all hosts if it is faster.

        Subnets are not compared between clusters: two sites may both use 192.168.1.0/24.
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
