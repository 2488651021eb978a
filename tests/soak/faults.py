"""The faults of a soak run and their times, drawn from a seed: the same seed gives the same faults.

    case = draw(17)
    case.layout, case.attempts          # for each start of the job, the faults that strike it
    draw_on_network(17)                 # the same on hosts of the testbed, whose links fail, too
    draw_elastic(17)                    # hosts are missing at a restart, and come back

The time of a fault is a place in a rank's code and the number of times that the rank has reached it; the fault
strikes ``delay_s`` later (0: exactly there, while the rank waits). So a seed replays its faults, whatever the load of the machine.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

STEPS = 14
LASTS = 1000
"""A run of at least this many steps is a lasting run."""

PLACES = {
    "joining": 1,
    "batch": STEPS,
    "forward": 3 * STEPS,
    "optimizer": STEPS,
    "validation": STEPS // 2,
    "snapshot": 5,
    "copy": 5,
    "rename": 5,
    "checkpoint": 4,
    "loading": 1,
    "ended": 1,
}
"""The places where a fault can strike, and how often a rank reaches each in a run at most."""
PLACES_ON_NETWORK = PLACES | {"gather": STEPS}
USERS_CODE = ("batch", "forward", "optimizer", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks and how they train. ``hosts``: the number of parts of the ranks that have their own snapshot folder.
    ``clusters``: number of clusters of the testbed, in which each host has a fast card and Ethernet; 0: the
    machine's own network."""

    size: int
    hosts: int
    name: str
    options: dict[str, Any]
    clusters: int = 0

    def on(self, hosts: int) -> "Layout":
        """Return the same layout on this many of the hosts."""
        return replace(self, size=self.size * hosts // self.hosts, hosts=hosts)

    @property
    def is_sharded(self) -> bool:
        return self.options["strategy"].get("sharding") == "optimizer"

    def host_of(self, rank: int) -> int:
        return rank * self.hosts // self.size

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank in range(self.size) if self.host_of(rank) == host]


TWO: dict[str, Any] = {"size": 2, "hosts": 2}
_REPLICAS: dict[str, Any] = {"strategy": {"pipeline_parallel_size": 1}}
_STAGES: dict[str, Any] = {"strategy": {"pipeline_parallel_size": 2}}
_SHARDS: dict[str, Any] = {"pipeline_parallel_size": 1, "sharding": "optimizer"}
_ASYNCHRONOUS: dict[str, Any] = {"strategy": _SHARDS | {"async_checkpoint": True}}
LAYOUTS = (
    Layout(size=2, hosts=1, name="two stages", options=_STAGES),
    Layout(**TWO, name="two stages, two hosts", options=_STAGES),
    Layout(**TWO, name="two replicas, two hosts, loaders' workers", options=_REPLICAS | {"workers": 1}),
    Layout(**TWO, name="sharded optimizer, asynchronous checkpoints", options=_ASYNCHRONOUS),
    Layout(size=4, hosts=2, name="two by two", options=_STAGES),
)

_LONGER: dict[str, Any] = {"steps": 40, "pace_s": 0.2}
NETWORKS = (
    Layout(**TWO, clusters=1, name="two stages over a fast card", options=_LONGER | _STAGES),
    Layout(**TWO, clusters=1, name="sharded optimizer over a fast card", options=_LONGER | {"strategy": _SHARDS}),
    Layout(size=4, hosts=4, clusters=2, name="two clusters, replicas inside", options=_LONGER | _STAGES),
    Layout(**TWO, clusters=2, name="two clusters, a stage each", options=_LONGER | _STAGES),
)
RANKS = "ranks"
"""A value for pipeline_parallel_size: as many stages as there are ranks."""
_KEPT: dict[str, Any] = {"keep_weights": True}
ELASTIC = (
    Layout(**TWO, name="two replicas, or one", options=_REPLICAS | {"counted": True} | _KEPT),
    Layout(**TWO, name="two stages, or one", options={"strategy": {"pipeline_parallel_size": RANKS}} | _KEPT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``rank`` reaches ``place`` for the ``count``-th time, and ``delay_s`` later ``kind`` strikes.

    Kinds: kill (the rank), kill host (all ranks of its host), lose host (kill host, and the host's memory is empty
    afterwards), SIGTERM (the host's ranks), SIGINT (all ranks), SIGINT to one, stop (SIGSTOP, SIGCONT after
    ``seconds``), hang (SIGSTOP), raise (in the user's code), full snapshots, full checkpoints (no space for them for
    ``seconds``), kill and tear (the newest snapshot of the rank's host is truncated afterwards), kill and flip (a byte
    of that snapshot is changed afterwards). On a network, for the rank's host: cut (its Ethernet, for ``seconds``), cut
    for long (for longer than the timeout). hosts return: all ranks get SIGTERM, as from a torchrun that restarts them
    with more hosts.
    """

    kind: str
    rank: int
    place: str
    count: int
    delay_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        after = f" {self.delay_s * 1e3:.0f} ms after" if self.delay_s else " at"
        return f"{self.kind} on rank {self.rank}{after} {self.place} {self.count}"


KINDS = {
    "kill": 4,
    "kill host": 2,
    "lose host": 2,
    "SIGTERM": 2,
    "SIGINT": 2,
    "SIGINT to one": 1,
    "stop": 2,
    "hang": 1,
    "raise": 2,
    "full snapshots": 2,
    "full checkpoints": 2,
    "kill and tear": 2,
    "kill and flip": 1,
}
"""The kinds of faults and their relative frequencies."""
KINDS_OF_LINKS = {"cut": 5, "cut for long": 2}
KINDS_OF_HOSTS = {"hosts return": 1}
_SECONDS = {"cut": (1.0, 5.0), "cut for long": (25.0, 30.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: its layout, the steps between snapshots, and the faults of each start; later starts have no faults.
    ``present``: the hosts that are present at each start; the last entry holds for all further starts; empty:
    always all hosts."""

    seed: int
    layout: Layout
    every: int
    attempts: tuple[tuple[Fault, ...], ...]
    present: tuple[tuple[int, ...], ...] = ()

    def hosts_at(self, start: int) -> tuple[int, ...]:
        """Return the indices of the hosts that are present at a start."""
        return self.present[min(start, len(self.present) - 1)] if self.present else tuple(range(self.layout.hosts))

    def __str__(self) -> str:
        faults = "; ".join(" and ".join(map(str, faults)) for faults in self.attempts)
        return f"seed {self.seed}, {self.layout.name}, a snapshot each {self.every} steps: {faults}"


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    layout = chance.choice(LAYOUTS)
    return _draw_case(chance, seed, layout, KINDS, PLACES)


def draw_on_network(seed: int) -> Case:
    """Return the case of a seed on the testbed."""
    chance = random.Random(seed)
    layout = chance.choice(NETWORKS)
    return _draw_case(chance, seed, layout, KINDS | KINDS_OF_LINKS, PLACES_ON_NETWORK)


def draw_elastic(seed: int) -> Case:
    """Return the case of a seed in which a host is lost or gets SIGTERM, is missing at the next start, and may come
    back."""
    chance = random.Random(seed)
    layout = chance.choice(ELASTIC)
    everyone = tuple(range(layout.hosts))
    present, attempts = [everyone], []
    for _ in range(chance.choice((1, 2, 2, 3, 4))):
        rank = 0
        if present[-1] == everyone:
            rank = chance.randrange(layout.size)
            kind = chance.choice(("kill host", "lose host", "SIGTERM"))
            following = tuple(host for host in everyone if host != layout.host_of(rank))
        elif chance.random() < 0.7:
            kind, following = "hosts return", everyone
        else:
            kind, following = "kill", present[-1]
        attempts.append((replace(_draw_fault(chance, layout, {kind: 1}, PLACES), rank=rank),))
        present.append(following)
    every = chance.choice((1, 2, 3))
    return Case(seed=seed, layout=layout, every=every, attempts=tuple(attempts), present=tuple(present))


def _draw_case(chance: random.Random, seed: int, layout: Layout, kinds: dict[str, int], places: dict[str, int]) -> Case:
    attempts = [
        tuple(_draw_fault(chance, layout, kinds, places) for _ in range(1 + (chance.random() < 0.2)))
        for _ in range(chance.choice((1, 1, 2, 3)))
    ]
    return Case(seed=seed, layout=layout, every=chance.choice((1, 2, 3)), attempts=tuple(attempts))


def _draw_fault(chance: random.Random, layout: Layout, kinds: dict[str, int], counts: dict[str, int]) -> Fault:
    kind = chance.choices(list(kinds), weights=list(kinds.values()))[0]
    places = [p for p in counts if (layout.hosts > 1 or p != "copy") and (layout.is_sharded or p != "gather")]
    if kind == "raise":
        places = [p for p in places if p in USERS_CODE]
    elif kind.startswith("full"):
        places = ["batch", "forward", "snapshot", "checkpoint"]
    place = chance.choice(places)
    exact = kind == "raise" or chance.random() < 0.6
    return Fault(
        kind=kind,
        rank=0 if chance.random() < 0.3 else chance.randrange(layout.size),
        place=place,
        count=chance.randint(1, counts[place]),
        delay_s=0.0 if exact else round(chance.uniform(0.0, 0.3 if place != "joining" else 2.0), 3),
        seconds=round(chance.uniform(*_SECONDS.get(kind, (0.5, 3.0))), 2),
    )


def lasting(num_steps: int) -> Case:
    """Return a case of one start with many steps, in which ranks are stopped and the snapshot memory is full for a
    while, now and then."""
    layout = Layout(**TWO, name=f"two stages, two hosts, {num_steps} steps", options=_STAGES | {"steps": num_steps})
    kinds = ("stop", "full snapshots")
    faults = [
        Fault(kind=kinds[number % 2], rank=number // 2 % 2, place="batch", count=number * num_steps // 20, seconds=1.0)
        for number in range(1, 20)
    ]
    return Case(seed=0, layout=layout, every=10, attempts=(tuple(faults),))
