"""Chooses the pairs of hosts that measure each class of link, schedules them, and puts the results into the topology.

Pure. Inside each cluster one pair of hosts measures the fabric, and one Ethernet. Between two clusters all their hosts send at once, each to
a host of its own in the other: their rates together are the link's. Speeds given in a topology file are not measured.

    pairs = choose_pairs(topology)
    slots, seconds, interval = schedule(pairs)              # the slot of each pair, and its times
    topology = with_speeds(topology, pairs, results)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_holmes.cluster.network import Cluster, Host, Link, LinkSpeed, Nic, TransportKind
from lightning_holmes.cluster.probe import ProbeResult
from lightning_holmes.cluster.topology import Topology

SECONDS = 0.5  # of sending per measurement, if few rounds are needed
_LEAST_SECONDS = 0.04
_BUDGET_S = 6.0  # for all rounds, so that 64 hosts stay under 10 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts that measure the links of one class. clusters: the same name twice for a pair inside a cluster."""

    clusters: tuple[str, str]
    transport: TransportKind
    hosts: tuple[str, str]
    nics: tuple[Nic, Nic]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The pair's key in the results."""
        return self.hosts[0], self.nics[0].name, self.hosts[1], self.nics[1].name


def choose_pairs(topology: Topology) -> list[Pair]:
    """Choose the pairs of hosts for every class of link whose speed is not given."""
    pairs: list[Pair] = []
    for cluster in topology.clusters:
        for transport in dict.fromkeys((cluster.fabric or "ethernet", "ethernet")):
            speed = cluster.speed(transport)
            if speed is None or not (speed.measured or speed.nic_bytes_per_s is None):
                pairs += _pair_inside(cluster, transport)
    stated = {frozenset(link.ends) for link in topology.links}
    for one, other in itertools.combinations(topology.clusters, 2):
        if frozenset((one.name, other.name)) not in stated:
            ways = zip(_usable_hosts(one, "ethernet"), _usable_hosts(other, "ethernet"), strict=False)
            pairs += [_pair((one, other), "ethernet", *way) for way in ways]
    return pairs


def schedule(pairs: Sequence[Pair]) -> tuple[list[int], float, float]:
    """Return (slot of each pair, seconds of sending, seconds from slot to slot). A cluster measures one class of link at a time."""
    busy: dict[str, set[int]] = {}
    taken: dict[tuple[tuple[str, str], TransportKind], int] = {}
    for pair in pairs:
        kind = pair.clusters, pair.transport
        if kind not in taken:
            both = [busy.setdefault(name, set()) for name in pair.clusters]
            taken[kind] = next(slot for slot in itertools.count() if not any(slot in own for own in both))
            for own in both:
                own.add(taken[kind])
    slots = [taken[pair.clusters, pair.transport] for pair in pairs]
    rounds = max(slots, default=0) + 1
    seconds = min(SECONDS, max(_LEAST_SECONDS, _BUDGET_S / rounds - 0.05))
    return slots, seconds, seconds + max(0.05, 0.2 * seconds)


def with_speeds(
    topology: Topology, pairs: Sequence[Pair], results: Mapping[tuple[str, str, str, str], ProbeResult]
) -> Topology:
    """Add to the topology the measured speeds, the NICs' nominal speeds where nothing was measured, and a warning for
    each pair of hosts that do not reach each other."""
    speeds: dict[str, list[LinkSpeed]] = {cluster.name: [] for cluster in topology.clusters}
    between: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by clusters: bandwidth and latency of each pair
    unreached = []
    for pair in pairs:
        result = results.get(pair.key)
        if result is None:
            continue
        if result.error is not None:
            unreached.append(
                f"{' and '.join(pair.hosts)} do not reach each other over {pair.transport}: {result.error[:1000]}"
            )
        if result.bandwidth_bytes_per_s is None or result.latency_s is None:
            continue
        if pair.clusters[0] == pair.clusters[1]:
            rates = [nic.bandwidth_bytes_per_s for nic in pair.nics if nic.bandwidth_bytes_per_s is not None]
            speeds[pair.clusters[0]].append(
                LinkSpeed(
                    transport=pair.transport,
                    bandwidth_bytes_per_s=result.bandwidth_bytes_per_s,
                    latency_s=result.latency_s,
                    nic_bytes_per_s=min(rates, default=None),
                    measured=True,
                )
            )
        else:
            between.setdefault(pair.clusters, []).append((result.bandwidth_bytes_per_s, result.latency_s))
    links = [
        Link(
            ends=ends,
            transport="ethernet",
            bandwidth_bytes_per_s=sum(rate for rate, _ in found),
            latency_s=min(latency for _, latency in found),
            measured=True,
        )
        for ends, found in between.items()
    ]
    measured = any(result.bandwidth_bytes_per_s is not None for result in results.values())
    return replace(
        topology,
        clusters=tuple(
            replace(cluster, speeds=_complete(cluster, speeds[cluster.name])) for cluster in topology.clusters
        ),
        links=(*topology.links, *links),
        warnings=(*topology.warnings, *dict.fromkeys(unreached)),
        measured_at_s=time.time() if measured else topology.measured_at_s,
    )


def _pair_inside(cluster: Cluster, transport: TransportKind) -> list[Pair]:
    """The first two hosts of a cluster that are on one fabric of this kind; none if there are no two."""
    usable = _usable_hosts(cluster, transport)
    if not usable:
        return []
    fabric = None if transport == "ethernet" else usable[0][1].fabric
    alike = [(host, nic) for host, _ in usable[1:] if (nic := _usable(host, transport, fabric)) is not None]
    return [_pair((cluster, cluster), transport, usable[0], other) for other in alike[:1]]


def _pair(
    clusters: tuple[Cluster, Cluster], transport: TransportKind, one: tuple[Host, Nic], other: tuple[Host, Nic]
) -> Pair:
    return Pair(
        clusters=(clusters[0].name, clusters[1].name),
        transport=transport,
        hosts=(one[0].name, other[0].name),
        nics=(one[1], other[1]),
    )


def _usable_hosts(cluster: Cluster, transport: TransportKind) -> list[tuple[Host, Nic]]:
    """The hosts of a cluster that have a card of this kind that sockets can use, with the first such card."""
    return [(host, nic) for host in cluster.hosts if (nic := _usable(host, transport)) is not None]


def _usable(host: Host, transport: TransportKind, fabric: str | None = None) -> Nic | None:
    usable = (nic for nic in host.nics if nic.kind == transport and nic.up and nic.addresses)
    return next((nic for nic in usable if fabric in (None, nic.fabric)), None)


def _complete(cluster: Cluster, measured: Sequence[LinkSpeed]) -> tuple[LinkSpeed, ...]:
    """The speeds of a cluster: measured ones, else those known before, else the nominal rate of the slowest host's NIC."""
    known = {speed.transport: speed for speed in (*cluster.speeds, *measured)}
    for transport in dict.fromkeys((cluster.fabric or "ethernet", "ethernet")):
        nics = [host.nic_of(transport) for host in cluster.hosts]
        rates = [nic.bandwidth_bytes_per_s for nic in nics if nic is not None]
        slowest = min((rate for rate in rates if rate is not None), default=None)
        if transport not in known and len(cluster.hosts) > 1 and slowest is not None and None not in rates:
            known[transport] = LinkSpeed(transport=transport, bandwidth_bytes_per_s=slowest, nic_bytes_per_s=slowest)
    return tuple(known.values())
