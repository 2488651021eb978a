"""Stragglers: finds a rank that has become so much slower than the others, minute after minute, that they wait for it.

Each rank's failure watch checks once a second whether its training thread waits for others. After a minute, and fifty
steps, it publishes in the job's store how long the thread has computed per step; rank 0 compares, and reports a rank
that takes more than one and a half times as long as the median of its replicas, which do the same work, or has grown
slower by that factor compared with the others.

    stragglers = Stragglers(store, "holmes/run/1", rank=0, world_size=4)
    stragglers.alike = [(0, 1), (2, 3)]                     # which ranks do the same work
    stragglers.look(waits=False, now=time.monotonic())      # by the watch's thread
    stragglers.told                                         # "rank 3 on host b1 holds the others up: ...", or ""

A wait for a device (NCCL's) looks like computing, so no rank is reported there. The plan of the run stays; the next
start measures the hosts anew.
"""

import json
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_TIMES = 1.5
_STEPS, _WINDOW_S = 50, 60.0


@dataclass(frozen=True, slots=True)
class _Pace:
    """A rank's seconds of computing per step, in the last window and in its first one; and its last step."""

    host: str
    seconds: float
    first: float
    step: int


class Stragglers:
    """The stragglers of one run, as seen by this rank.

    Args:
        store: the job's store; used only in the thread that calls :meth:`look`.
        prefix: the prefix of this run's keys in the store.

    Attributes:
        told: on rank 0, the rank that is slow now, in words; "": none.
        steps: returns the number of training steps done; None: nothing is being trained.
        alike: the ranks of each stage, which do the same work.
        on_told: each function is called on rank 0 with a new report.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, world_size: int) -> None:
        self.told = ""
        self.steps: Callable[[], int | None] = lambda: None
        self.alike: Sequence[Sequence[int]] = ()
        self.on_told: list[Callable[[str], None]] = []
        self._store, self._prefix = store, f"{prefix}/pace"
        self._rank, self._world_size = rank, world_size
        self._looked = 0.0
        self._began: tuple[float, int] | None = None  # the window's start: time and step
        self._computed_s = 0.0
        self._first: float | None = None
        self._slow: int | None = None

    def look(self, *, waits: bool, now: float) -> None:
        """Note whether the training thread waits for others; at the end of a window publish this rank's pace, and on rank 0 compare.

        Args:
            now: in seconds.
        """
        steps = self.steps()
        if steps is None or self._began is None:
            self._began = None if steps is None else (now, steps)
            self._looked, self._computed_s = now, 0.0
            return
        self._computed_s += 0.0 if waits else now - self._looked
        self._looked = now
        since, first_step = self._began
        if now - since < _WINDOW_S or steps - first_step < _STEPS:
            return
        seconds = self._computed_s / (steps - first_step)
        self._began, self._computed_s = (now, steps), 0.0
        if self._first is None:
            self._first = seconds
        mine = [socket.gethostname(), seconds, self._first, steps]
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(mine))
        if self._rank == 0:
            self._compare()

    def _compare(self) -> None:
        keys = [f"{self._prefix}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return
        slow, self.told = _slowest([_Pace(*json.loads(self._store.get(key))) for key in keys], self.alike)
        if slow is not None and slow != self._slow:
            print(f"[rank 0] {self.told}", file=sys.stderr, flush=True)
            for act in self.on_told:
                act(self.told)
        self._slow = slow


def _slowest(paces: Sequence[_Pace], alike: Sequence[Sequence[int]]) -> tuple[int | None, str]:
    """The rank that is slower than the others by the largest factor, if that is more than _TIMES, and the report; else None and ""."""
    found: list[tuple[float, int, str]] = []
    growth = [pace.seconds / max(pace.first, 1e-9) for pace in paces]
    for rank, pace in enumerate(paces):
        begins = f"rank {rank} on host {pace.host} holds the others up: at step {pace.step} it computes {pace.seconds:.3g} s for a step"
        replicas = [paces[other].seconds for group in alike if rank in group for other in group if other != rank]
        if replicas:
            usual = statistics.median(replicas)
            found.append((pace.seconds / max(usual, 1e-9), rank, f"{begins}, and its replicas {usual:.3g} s"))
        others = statistics.median(growth[:rank] + growth[rank + 1 :])
        found.append(
            (
                growth[rank] / max(others, 1e-9),
                rank,
                f"{begins}, and {pace.first:.3g} s at first; the others have not become so slow",
            )
        )
    times, rank, words = max(found)
    if times <= _TIMES:
        return None, ""
    return rank, f"{words}. Is that host throttled, swapping, or busy with other work?"
