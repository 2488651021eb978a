"""Which devices form stages on one RDMA fabric, where hosts may have cards on several fabrics.

It only counts devices by their hosts' fabrics. placement.py decides which ranks they are, and their order.

    a, b = (1, "a"), (1, "b")
    counts = {frozenset({a}): 1, frozenset({a, b}): 1, frozenset({b}): 2}
    share_out(counts, 2)      # {a: {{a}: 1, {a, b}: 1}, b: {{b}: 2}}: two stages of two devices
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping

Fabric = tuple[int, str]
"""(rank of its kind of card, the fastest kind first; name)."""

Fabrics = frozenset[Fabric]
"""The fabrics that a host is on."""

Shares = dict[Fabric, Counter[Fabrics]]
"""For each fabric, the number of devices in its stages, by the fabrics that their hosts are on."""

MOST_TRIED = 6
"""The largest number of fabrics joined by hosts for which the exact solution is computed; the work doubles with each fabric."""


def needed(counts: Mapping[Fabrics, int], size: int) -> Fabrics:
    """The fabrics with at least ``size`` devices that no other such fabric covers.

    A fabric covers another if all hosts of the other are on it, too. ``counts``: devices by their hosts' fabrics.
    """
    members: dict[Fabric, list[Fabrics]] = defaultdict(list)
    reach = _reach(counts)
    for hosts in counts:
        for fabric in hosts:
            if reach[fabric] >= size:
                members[fabric].append(hosts)
    alike: dict[tuple[Fabrics, ...], Fabric] = {}
    for fabric in sorted(members):
        alike.setdefault(tuple(members[fabric]), fabric)
    found = frozenset(alike.values())
    return frozenset(fabric for fabric in found if len(found.intersection(*members[fabric])) == 1)


def share_out(counts: Mapping[Fabrics, int], size: int) -> Shares:
    """Assign devices to fabrics in whole stages of ``size`` devices, with as many stages as possible, or nearly so.

    ``counts``: devices by their hosts' fabrics. Exact unless hosts join more than MOST_TRIED fabrics, each of which
    could have another stage after the stages formed by devices whose hosts are on the same fabrics.
    """
    shares: Shares = defaultdict(Counter)
    left = Counter(counts)
    for hosts, count in counts.items():
        # with more than n * (size - 1) devices on n fabrics, a best layout gives size of them to one fabric: a whole stage
        whole = max(0, -((len(hosts) * (size - 1) - count) // size))
        if hosts and whole:
            shares[min(hosts)][hosts] += whole * size
            left[hosts] -= whole * size
    for fabrics, tied in _ties(left, size):
        take = _take_the_most if len(fabrics) <= MOST_TRIED else _take_in_turn
        for fabric, taken in take(fabrics, tied, size).items():
            shares[fabric] += taken
    return {fabric: shares[fabric] for fabric in sorted(shares)}


def _reach(counts: Mapping[Fabrics, int]) -> Counter[Fabric]:
    """The number of devices of the hosts on each fabric."""
    reach: Counter[Fabric] = Counter()
    for hosts, count in counts.items():
        for fabric in hosts:
            reach[fabric] += count
    return reach


def _ties(counts: Mapping[Fabrics, int], size: int) -> list[tuple[list[Fabric], dict[Fabrics, int]]]:
    """Connected components of the fabrics with devices for a stage (joined by common hosts), each with the devices of its hosts."""
    reach = _reach(counts)
    live = {hosts: [fabric for fabric in hosts if reach[fabric] >= size] for hosts, count in counts.items() if count}
    members: dict[Fabric, list[Fabrics]] = defaultdict(list)
    for hosts, fabrics in live.items():
        for fabric in fabrics:
            members[fabric].append(hosts)
    ties = []
    seen: set[Fabric] = set()
    for first in members:
        if first in seen:
            continue
        seen.add(first)
        tie = [first]
        tied: dict[Fabrics, int] = {}
        for fabric in tie:  # tie grows in this loop
            for hosts in members[fabric]:
                if hosts not in tied:
                    tied[hosts] = counts[hosts]
                    new = [other for other in live[hosts] if other not in seen]
                    seen.update(new)
                    tie += new
        ties.append((sorted(tie), tied))
    return ties


def _take_the_most(fabrics: list[Fabric], counts: Mapping[Fabrics, int], size: int) -> Shares:
    """The exact solution: numbers of stages are feasible if every set of fabrics reaches enough devices for its stages (Hall)."""
    every = range(1 << len(fabrics))  # a set of fabrics has bit i for fabrics[i]
    bits = {hosts: sum(1 << i for i, fabric in enumerate(fabrics) if fabric in hosts) for hosts in counts}
    reach = [sum(counts[hosts] for hosts in counts if bits[hosts] & chosen) for chosen in every]
    stages = _most_stages([devices // size for devices in reach], len(fabrics))
    needs = [0]
    for count in stages:
        needs += [need + size * count for need in needs]
    spare = [devices - need for devices, need in zip(reach, needs, strict=True)]
    shares: Shares = {}
    left = dict(counts)
    for i, fabric in enumerate(fabrics):
        # sets of later fabrics, which must keep enough devices
        later = [chosen for chosen in every if chosen and not chosen & ((2 << i) - 1)]
        shares[fabric] = Counter()
        need = size * stages[i]
        for hosts in sorted(counts, key=len):
            if bits[hosts] >> i & 1:
                touched = [chosen for chosen in later if bits[hosts] & chosen]
                taken = min(need, left[hosts], *(spare[chosen] for chosen in touched))
                for chosen in touched:
                    spare[chosen] -= taken
                shares[fabric][hosts] = taken
                left[hosts] -= taken
                need -= taken
    return shares


def _most_stages(room: list[int], num_fabrics: int) -> list[int]:
    """Numbers of stages by fabric with the largest sum, where each set of fabrics has at most room[set] stages."""
    best, most = [0] * num_fabrics, 0

    def add(stages: list[int], sums: list[int]) -> None:
        """Try all numbers of stages for the next fabric; sums[set]: the stages of each set of the fabrics so far."""
        nonlocal best, most
        i = len(stages)
        if i == num_fabrics:
            if sums[-1] > most:
                best, most = stages, sums[-1]
            return
        later = (len(room) - 1) & ~((2 << i) - 1)
        for count in range(min(room[s | 1 << i] - sums[s] for s in range(1 << i)), -1, -1):
            if most == room[-1] or sums[-1] + count + room[later] <= most:
                return
            now = sums + [before + count for before in sums]
            if now[-1] + min(room[later | s] - now[s] for s in range(2 << i)) > most:
                add([*stages, count], now)

    add([], [0])
    return best


def _take_in_turn(fabrics: list[Fabric], counts: Mapping[Fabrics, int], size: int) -> Shares:
    """A greedy solution: the fabric with the fewest devices goes first, and takes devices of hosts on the fewest other fabrics first."""
    shares: Shares = {}
    left = dict(counts)
    members: dict[Fabric, list[Fabrics]] = {fabric: [] for fabric in fabrics}
    for hosts in counts:
        for fabric in (fabric for fabric in hosts if fabric in members):
            members[fabric].append(hosts)
    choices = {hosts: len(hosts & members.keys()) for hosts in counts}
    reach = _reach(counts)
    queue = [(reach[fabric], fabric) for fabric in fabrics]
    heapq.heapify(queue)
    done: set[Fabric] = set()
    while queue:
        devices, fabric = heapq.heappop(queue)
        if fabric in done or devices != reach[fabric]:
            continue
        done.add(fabric)
        shares[fabric] = Counter()
        need = devices - devices % size
        for hosts in sorted(members[fabric], key=choices.__getitem__):
            choices[hosts] -= 1
            taken = min(need, left[hosts])
            if taken:
                shares[fabric][hosts] = taken
                left[hosts] -= taken
                need -= taken
                for other in hosts & members.keys():
                    reach[other] -= taken
                    if other not in done:
                        heapq.heappush(queue, (reach[other], other))
    return shares
