"""Chooses the pairs of hosts that measure each class of link, schedules them, and puts the results into the topology.

Pure. Classes: inside each cluster on its fabric and on Ethernet, and Ethernet between
each pair of clusters: one pair alone, and then several at once, to find whether they share the bandwidth. Speeds given in a topology
file are not measured. Pairs without a common host measure at the same time, so that a job of 64 hosts needs few rounds.

    pairs = choose_pairs(topology)
    slots, seconds, interval = schedule(pairs)              # the slot of each pair, and its times
    topology = with_speeds(topology, pairs, results)
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_holmes.cluster.network import Cluster, Host, Link, LinkSpeed, Nic, TransportKind, Unreachable
from lightning_holmes.cluster.probe import ProbeResult
from lightning_holmes.cluster.topology import Topology

SECONDS = 0.5  # of sending per measurement, if few rounds are needed
_LEAST_SECONDS = 0.04
_BUDGET_S = 6.0  # for all rounds, so that 64 hosts stay under 10 s
_MOST_TOGETHER = 8  # pairs of hosts that send at once between two clusters
_UNHINDERED = 0.8  # pairs that reach this share of the lone pair's rate at once do not limit each other measurably


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts that measure the links of one class. clusters: the same name twice for a pair inside a cluster.

    together: the pair sends at the same time as the others between these clusters, in the opposite direction to the lone pair.
    """

    clusters: tuple[str, str]
    transport: TransportKind
    hosts: tuple[str, str]
    nics: tuple[Nic, Nic]
    together: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The pair's key in the results."""
        return self.hosts[0], self.nics[0].name, self.hosts[1], self.nics[1].name


def choose_pairs(topology: Topology) -> list[Pair]:
    """Choose one pair of hosts for every class of link whose speed is not given, and several more between clusters of several hosts.
    Hosts take turns, so that pairs can run at the same time."""
    pairs: list[Pair] = []
    turns = dict.fromkeys((cluster.name for cluster in topology.clusters), 0)
    for cluster in topology.clusters:
        for transport in dict.fromkeys((cluster.fabric or "ethernet", "ethernet")):
            speed = cluster.speed(transport)
            if speed is None or not (speed.measured or speed.nic_bytes_per_s is None):
                pair = _pair_inside(cluster, transport, turns)
                if pair is not None:
                    pairs.append(pair)
    stated = {frozenset(link.ends) for link in topology.links}
    for index, one in enumerate(topology.clusters):
        for other in topology.clusters[index + 1 :]:
            if frozenset((one.name, other.name)) not in stated:
                first, second = _take(one, "ethernet", turns), _take(other, "ethernet", turns)
                if first is not None and second is not None:
                    pairs.append(
                        Pair(
                            clusters=(one.name, other.name),
                            transport="ethernet",
                            hosts=(first[0].name, second[0].name),
                            nics=(first[1], second[1]),
                        )
                    )
                    pairs += _pairs_together(one, other)
    return pairs


def _pairs_together(one: Cluster, other: Cluster) -> list[Pair]:
    """Pairs of different hosts, from the second cluster to the first; none if a cluster has fewer than two usable hosts."""
    usable = [
        [(host.name, nic) for host in cluster.hosts if (nic := _usable(host, "ethernet", None)) is not None]
        for cluster in (other, one)
    ]
    if min(map(len, usable)) < 2:
        return []
    return [
        Pair(
            clusters=(one.name, other.name),
            transport="ethernet",
            hosts=(first[0], second[0]),
            nics=(first[1], second[1]),
            together=True,
        )
        for first, second in list(zip(*usable, strict=False))[:_MOST_TOGETHER]
    ]


def schedule(pairs: Sequence[Pair]) -> tuple[list[int], float, float]:
    """Return (slot of each pair, seconds of sending, seconds from slot to slot). No host is in two pairs of a slot; while pairs measure
    together, no other pair of their clusters measures."""
    hosts: dict[str, set[int]] = defaultdict(set)
    clusters: dict[str, set[int]] = defaultdict(set)
    taken: dict[Pair | tuple[str, str], int] = {}
    for pair in sorted(pairs, key=lambda pair: pair.together):  # pairs that need their clusters exclusively come last
        key = pair.clusters if pair.together else pair
        if key not in taken:
            busy = [clusters[name] for name in pair.clusters] if pair.together else [hosts[name] for name in pair.hosts]
            taken[key] = next(slot for slot in itertools.count() if not any(slot in those for those in busy))
        for name in pair.hosts:
            hosts[name].add(taken[key])
        for name in pair.clusters:
            clusters[name].add(taken[key])
    slots = [taken[pair.clusters if pair.together else pair] for pair in pairs]
    rounds = max(slots, default=0) + 1
    seconds = min(SECONDS, max(_LEAST_SECONDS, _BUDGET_S / rounds - 0.05))
    return slots, seconds, seconds + max(0.05, 0.2 * seconds)


def with_speeds(
    topology: Topology, pairs: Sequence[Pair], results: Mapping[tuple[str, str, str, str], ProbeResult]
) -> Topology:
    """Add to the topology the measured speeds, the NICs' nominal speeds where nothing was measured, and the unreachable pairs."""
    speeds: dict[str, list[LinkSpeed]] = {cluster.name: [] for cluster in topology.clusters}
    links = list(topology.links)
    unreachable = list(topology.unreachable)
    for pair in pairs:
        result = results.get(pair.key)
        if result is None or pair.together:
            continue
        if result.error is not None:
            unreachable.append(Unreachable(ends=pair.hosts, transport=pair.transport, reason=result.error[:1000]))
        if result.bandwidth_bytes_per_s is None or result.latency_s is None:
            continue
        if pair.clusters[0] == pair.clusters[1]:
            speeds[pair.clusters[0]].append(
                LinkSpeed(
                    transport=pair.transport,
                    bandwidth_bytes_per_s=result.bandwidth_bytes_per_s,
                    latency_s=result.latency_s,
                    nic_bytes_per_s=_slower(pair.nics),
                    measured=True,
                )
            )
        else:
            links.append(
                Link(
                    ends=pair.clusters,
                    transport=pair.transport,
                    bandwidth_bytes_per_s=result.bandwidth_bytes_per_s,
                    latency_s=result.latency_s,
                    shared_bytes_per_s=_shared(topology, pair, pairs, results, result.bandwidth_bytes_per_s),
                    measured=True,
                )
            )
    measured = any(result.bandwidth_bytes_per_s is not None for result in results.values())
    return replace(
        topology,
        clusters=tuple(
            replace(cluster, speeds=_complete(cluster, speeds[cluster.name])) for cluster in topology.clusters
        ),
        links=tuple(links),
        unreachable=tuple(dict.fromkeys(unreachable)),
        measured_at_s=time.time() if measured else topology.measured_at_s,
    )


def _shared(
    topology: Topology,
    lone: Pair,
    pairs: Sequence[Pair],
    results: Mapping[tuple[str, str, str, str], ProbeResult],
    alone: float,
) -> float | None:
    """Bytes/s that all hosts of two clusters reach together; None if that was not measured.

    If the measured pairs do not limit each other, their mean rate is assumed for every pair of hosts.
    """
    mine = [pair for pair in pairs if pair.together and pair.clusters == lone.clusters]
    found = [result.bandwidth_bytes_per_s for pair in mine if (result := results.get(pair.key)) is not None]
    rates = [rate for rate in found if rate is not None]
    if not mine or len(rates) < len(mine):
        return None
    together = max(alone, sum(rates))
    if together < _UNHINDERED * len(mine) * alone:
        return together
    fewest = min(len(cluster.hosts) for cluster in topology.clusters if cluster.name in lone.clusters)
    return together * fewest / len(mine)


def _pair_inside(cluster: Cluster, transport: TransportKind, turns: dict[str, int]) -> Pair | None:
    first = _take(cluster, transport, turns)
    if first is None:
        return None
    for host in (*cluster.hosts[turns[cluster.name] :], *cluster.hosts[: turns[cluster.name]]):
        nic = _usable(host, transport, first[1].fabric if transport != "ethernet" else None)
        if host.name != first[0].name and nic is not None:
            turns[cluster.name] = (cluster.hosts.index(host) + 1) % len(cluster.hosts)
            return Pair(
                clusters=(cluster.name, cluster.name),
                transport=transport,
                hosts=(first[0].name, host.name),
                nics=(first[1], nic),
            )
    return None


def _take(cluster: Cluster, transport: TransportKind, turns: dict[str, int]) -> tuple[Host, Nic] | None:
    """The next host of a cluster with a card of this kind that sockets can use."""
    for step in range(len(cluster.hosts)):
        index = (turns[cluster.name] + step) % len(cluster.hosts)
        nic = _usable(cluster.hosts[index], transport, None)
        if nic is not None:
            turns[cluster.name] = (index + 1) % len(cluster.hosts)
            return cluster.hosts[index], nic
    return None


def _usable(host: Host, transport: TransportKind, fabric: str | None) -> Nic | None:
    for nic in host.nics:
        if nic.kind == transport and nic.up and nic.addresses and fabric in (None, nic.fabric):
            return nic
    return None


def _slower(nics: Sequence[Nic]) -> float | None:
    rates = [nic.bandwidth_bytes_per_s for nic in nics if nic.bandwidth_bytes_per_s is not None]
    return min(rates) if rates else None


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
