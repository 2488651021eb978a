"""What goes wrong in a run of the soak, and when: drawn from a seed, the same for the same seed.

    case = draw(17)
    case.layout, case.attempts          # for each start of the job the faults that strike it

A moment is a place in a rank's code and how often the rank has come there; ``delay_s`` later (0: exactly there, while the rank waits) the
fault strikes. So a seed replays its faults, whatever the machine does beside.
"""

import random
from dataclasses import dataclass
from typing import Any

STEPS = 14
LASTS = 1000
"""Steps from which on a run is one that lasts."""

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
"""Where a fault can strike, and how often a rank comes there in a run at the most."""
USERS_CODE = ("batch", "forward", "optimizer", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks, and how they train. ``hosts``: so many parts of the ranks have a snapshot folder each."""

    size: int
    hosts: int
    name: str
    options: dict[str, Any]

    def host_of(self, rank: int) -> int:
        return rank * self.hosts // self.size

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank in range(self.size) if self.host_of(rank) == host]


LAYOUTS = (
    Layout(size=2, hosts=1, name="two stages", options={"strategy": {"pipeline_parallel_size": 2}}),
    Layout(size=2, hosts=2, name="two stages, two hosts", options={"strategy": {"pipeline_parallel_size": 2}}),
    Layout(
        size=2,
        hosts=2,
        name="two replicas, two hosts, loaders' workers",
        options={"strategy": {"pipeline_parallel_size": 1}, "workers": 1},
    ),
    Layout(
        size=2,
        hosts=2,
        name="sharded optimizer, asynchronous checkpoints",
        options={"strategy": {"pipeline_parallel_size": 1, "sharded_optimizer": True, "async_checkpoint": True}},
    ),
    Layout(size=4, hosts=2, name="two by two", options={"strategy": {"pipeline_parallel_size": 2}}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``rank`` comes to ``place`` for the ``count``-th time, and ``delay_s`` later ``kind`` strikes.

    Kinds: kill (the rank), kill host (all of its host), lose host (and the host's memory is empty afterwards), SIGTERM (the host's ranks),
    SIGINT (all ranks), SIGINT to one, stop (SIGSTOP, SIGCONT after ``seconds``), hang (SIGSTOP), raise (the user's code), full snapshots, full
    checkpoints (no room there for ``seconds``), kill and tear (the newest snapshot of the rank's host is cut off afterwards), kill and flip (likewise a
    byte of it is another one).
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
"""Kinds, and how often each is drawn, compared with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: its layout, steps between snapshots, and the faults of each start; after those it is left alone."""

    seed: int
    layout: Layout
    every: int
    attempts: tuple[tuple[Fault, ...], ...]

    def __str__(self) -> str:
        faults = "; ".join(" and ".join(map(str, faults)) for faults in self.attempts)
        return f"seed {self.seed}, {self.layout.name}, a snapshot each {self.every} steps: {faults}"


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    layout = chance.choice(LAYOUTS)
    attempts = [
        tuple(_draw_fault(chance, layout) for _ in range(1 + (chance.random() < 0.2)))
        for _ in range(chance.choice((1, 1, 2, 3)))
    ]
    return Case(seed=seed, layout=layout, every=chance.choice((1, 2, 3)), attempts=tuple(attempts))


def _draw_fault(chance: random.Random, layout: Layout) -> Fault:
    kind = chance.choices(list(KINDS), weights=list(KINDS.values()))[0]
    places = [p for p in PLACES if layout.hosts > 1 or p != "copy"]
    if kind == "raise":
        places = list(USERS_CODE)
    elif kind.startswith("full"):
        places = ["batch", "forward", "snapshot", "checkpoint"]
    place = chance.choice(places)
    exact = kind == "raise" or chance.random() < 0.6
    return Fault(
        kind=kind,
        rank=0 if chance.random() < 0.3 else chance.randrange(layout.size),
        place=place,
        count=chance.randint(1, PLACES[place]),
        delay_s=0.0 if exact else round(chance.uniform(0.0, 0.3 if place != "joining" else 2.0), 3),
        seconds=round(chance.uniform(0.5, 3.0), 2),
    )


def lasting(num_steps: int) -> Case:
    """One start of many steps, whose ranks are stopped and whose memory is full for a while, now and then."""
    layout = Layout(
        size=2,
        hosts=2,
        name=f"two stages, two hosts, {num_steps} steps",
        options={"strategy": {"pipeline_parallel_size": 2}, "steps": num_steps},
    )
    kinds = ("stop", "full snapshots")
    faults = [
        Fault(kind=kinds[number % 2], rank=number // 2 % 2, place="batch", count=number * num_steps // 20, seconds=1.0)
        for number in range(1, 20)
    ]
    return Case(seed=0, layout=layout, every=10, attempts=(tuple(faults),))
