"""Heartbeat: a rank says once a second in the job's store where it is, and listens to its neighbours.

Ranks are in a ring. No clocks are compared: a rank counts its own seconds in which a neighbour's number stays the same,
so that on a busy machine, where the listener is late as well, nobody is taken for dead. A rank that waits for others
for long reads what all ranks say: who is silent, and who is late, with the place of its training thread.

    heartbeat = Heartbeat(store, "holmes/run/1", rank=0, world_size=4, timeout_s=1800.0)
    heartbeat.tick()            # once a second, in a thread
    heartbeat.lost              # (3, "nothing has been heard of rank 3 on host b1 for 18 s: ..."), or None
    heartbeat.late              # "rank 3 on host b1, in step 120, does not come: it is in loader.py:33 read < ...", or ""

A call that holds Python's lock silences a live process, for example json.load of a large file. A neighbour on the same
host sees whether the process lives, is stopped or has ended. On another host silence alone ends a run only within the
actions of a step. Else it is reported after the same time, and ends the run at the timeout.
"""

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_holmes.comm.lost import is_of_libraries

SILENT_TICKS = 18  # a link that is cut for a shorter time only delays the run
_ENDED_TICKS = 3  # of silence, before a neighbour looks whether the process has ended
_CENSUS_TICKS = 3  # of silence beside an error that is certain already
_PATIENCE_S = 20.0  # a rank that waits for longer finds out for whom
_BUSY = 0.05  # a thread that computes for more than this part of the time does not wait
_BUSY_TICKS = 5  # and is looked at so often, since that takes 1 to 2.5 ms of a core (a wait may spin: CUDA's)
_SHOWN = 5  # frames of a stack, and ranks, that a message shows
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, "<")
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$', re.MULTILINE)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class _Beat:
    """What a rank says, or an optimizer node. ``number`` grows with each beat; -1: its run has ended well.

    ``in_step``: it performs the actions of a step. ``waits``: its training thread waits for other ranks, in ``stack``.
    """

    number: int
    host: str
    machine: str
    pid: int
    in_step: bool
    place: str
    waits: bool
    stack: list[str]
    name: str

    def describe(self) -> str:
        return f"{self.name} on host {self.host}{self.place and ', ' + self.place + ','}"


class Heartbeat:
    """The heartbeat of this rank's present run; the thread that makes it is the one that trains.

    Args:
        store: the job's store; used only in the thread that calls :meth:`tick`.
        prefix: the prefix of this run's keys in the store.
        timeout_s: of transfers; None: none.
        name: what others call it; None: the rank.

    Attributes:
        where: returns where the training thread is, in words, and whether it performs the actions of a step.
        late: for whom this rank waits, in words, as far as it is known; empty: it does not wait for long.
        silent: the ranks of which nothing has been heard, in the last census.
        lost: a neighbour that is lost, and why.
        patience: the seconds of waiting after which this rank finds out for whom.
        answered: set once a census that was asked for has ended.
    """

    def __init__(
        self, store: Any, prefix: str, *, rank: int, world_size: int, timeout_s: float | None, name: str | None = None
    ) -> None:
        self.where: Callable[[], tuple[str, bool]] = lambda: ("", False)
        self.late = ""
        self.silent: frozenset[int] = frozenset()
        self.lost: tuple[int, str] | None = None
        self.answered = threading.Event()
        self._store, self._prefix = store, f"{prefix}/beat"
        self._rank, self._world_size = rank, world_size
        self._name = name or f"rank {rank}"
        self._timeout_ticks = float("inf") if timeout_s is None else timeout_s
        self.patience = min(_PATIENCE_S, self._timeout_ticks / 2)
        self._neighbours = {(rank + step) % world_size for step in (1, -1)} - {rank}
        self._heard: dict[int, tuple[int, int]] = {}  # by neighbour: its last number, and for how many ticks
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if hasattr(time, "pthread_getcpuclockid") else None
        self._computed_s, self._looked = self._cpu_s(), time.monotonic()
        self._host, self._machine = socket.gethostname(), _machine()
        self.number = self._waited = 0
        self._at: tuple[str, ...] = ()
        self._stack: list[tuple[str, str]] = []
        self._dump = _nameless_file()
        self._asked = self._asks_late = False
        self._census: tuple[int, dict[int, _Beat]] | None = None

    def tick(self) -> None:
        """Say where this rank is, listen to its neighbours, and if it has waited for long, find out for whom."""
        self._say()
        for neighbour in self._neighbours:
            self._listen(neighbour)
        if self._census is not None and self.number - self._census[0] >= min(_CENSUS_TICKS, self.patience / 2):
            self._conclude(self._census[1], self._read_all())
            self._census = None
        elif self._census is None and (self._asked or 0 <= self._waited - self.patience < 1):
            self._census = self.number, self._read_all()

    def ask(self, *, late: bool) -> None:
        """Begin to find out which ranks are silent, since this rank's connection has failed; :attr:`answered` is set a few
        ticks later. ``late``: and which ones are late, since nothing came in time."""
        self._asks_late, self._asked = late, True

    def leave(self) -> None:
        """Say that this rank's run has ended well."""
        self.number = -1
        self._say_at(-1, "", False, False, [])

    def _say(self) -> None:
        now, computed_s = time.monotonic(), self._cpu_s()
        is_busy = computed_s - self._computed_s > _BUSY * (now - self._looked)
        self._computed_s, self._looked = computed_s, now
        if not is_busy or self.number % _BUSY_TICKS == 0:
            self._stack = self._frames()
        waits, stack = _waits(self._stack), _shown(self._stack)
        place, in_step = self.where()
        at = (place, *stack)
        self._waited = self._waited + 1 if waits and not is_busy and at == self._at else 0
        self._at = at
        if not waits or is_busy:
            self.late = ""
        self.number += 1
        self._say_at(self.number, place, in_step, waits, stack)

    def _frames(self) -> list[tuple[str, str]]:
        """The file and the place in words of each frame of the training thread, the innermost first; empty if it has ended.

        Not by ``sys._current_frames``: in Python 3.11 it may wait for ever (https://github.com/python/cpython/issues/106883), and reading
        frames of a thread that goes on has ended processes by signal 11 (https://github.com/python/cpython/issues/111363).
        """
        self._dump.seek(0)
        self._dump.truncate()
        faulthandler.dump_traceback(self._dump, all_threads=True)
        self._dump.seek(0)
        _, _, of_thread = self._dump.read().decode(errors="replace").partition(f"hread {self._thread:#018x} ")
        return [
            (file, f"{os.path.basename(file)}:{line} {name}")
            for file, line, name in _FRAME.findall(of_thread.partition("\n\n")[0])
        ]

    def _say_at(self, number: int, place: str, in_step: bool, waits: bool, stack: list[str]) -> None:
        beat = _Beat(number, self._host, self._machine, os.getpid(), in_step, place, waits, stack, self._name)
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps([getattr(beat, n) for n in _Beat.__slots__]))

    def _read(self, rank: int) -> _Beat | None:
        """What a rank said last; None if it has not begun this run."""
        key = f"{self._prefix}/{rank}"
        if rank not in self._heard and not self._store.check([key]):
            return None
        return _Beat(*json.loads(self._store.get(key)))

    def _read_all(self) -> dict[int, _Beat]:
        found = {rank: self._read(rank) for rank in range(self._world_size)}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def _listen(self, neighbour: int) -> None:
        """Note for how long a neighbour has been silent, and whether it is lost."""
        beat = self._read(neighbour)
        if beat is None or self.lost is not None:
            return
        number, ticks = self._heard.get(neighbour, (0, 0))
        ticks = 0 if beat.number != number or number < 0 else ticks + 1
        self._heard[neighbour] = beat.number, ticks
        if ticks < _ENDED_TICKS:
            return
        state = _state_of(beat.pid) if beat.machine == self._machine else None
        why = f"its process {state}" if state else "its process has ended or is stopped, or its host is cut off"
        heard = f"nothing has been heard of {beat.describe()} for {ticks} s: {why}"
        ends_run = state == "is stopped" or (state is None and beat.in_step) or ticks >= self._timeout_ticks
        if state == "has ended" or (ticks >= SILENT_TICKS and ends_run):
            self.lost = neighbour, heard
        elif ticks == SILENT_TICKS:
            print(f"[{self._name}] {heard}", file=sys.stderr, flush=True)

    def _conclude(self, before: dict[int, _Beat], now: dict[int, _Beat]) -> None:
        """Name the ranks that are silent or late, by two readings of what all ranks say."""
        others = {rank: beat for rank, beat in now.items() if rank != self._rank and beat.number >= 0}
        self.silent = frozenset(r for r, beat in others.items() if r in before and before[r].number == beat.number)
        if self._waited >= self.patience or (self._asked and (self._asks_late or self.silent)):
            self.late = _describe(now, self.silent)
        if self._asked:
            self._asked = False
            self.answered.set()
        elif self.late and not any(
            rank < self._rank and beat.waits and rank not in self.silent for rank, beat in now.items()
        ):
            print(f"[rank {self._rank}] has waited for {self._waited} s: {self.late}", file=sys.stderr, flush=True)

    def _cpu_s(self) -> float:
        """The CPU seconds of the training thread."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def _describe(beats: dict[int, _Beat], silent: frozenset[int]) -> str:
    """Which ranks are silent or late, and what they do; if there are none, what each rank waits in."""
    late = [rank for rank, beat in beats.items() if not beat.waits and beat.number >= 0 and rank not in silent]
    shown = [*sorted(silent), *late] or sorted(beats)
    told = []
    for rank in shown[:_SHOWN]:
        beat = beats[rank]
        stack = " < ".join(beat.stack)
        if rank in silent:
            told.append(f"nothing is heard of {beat.describe()} its process is stopped or gone, or its host is cut off")
        else:
            does = "does not come: it is in" if rank in late else "waits for others in"
            told.append(f"{beat.describe()} {does} {stack}")
    left = len(shown) - _SHOWN
    return "; ".join(told) + (f"; and {left} more" if left > 0 else "")


def _nameless_file() -> Any:
    """A file for a moment's text, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b", 0)
    return tempfile.TemporaryFile(buffering=0)


def _machine() -> str:
    """What processes that see each other in /proc have in common; a process without /proc sees no other."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.getpid()}"


def _state_of(pid: int) -> str:
    """The state of a process of this machine: "has ended", "is stopped", or that it is held up."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    return "has ended" if letter in "ZX" else "is stopped" if letter in "Tt" else "is held by one call, or swapped out"


def _shown(frames: Sequence[tuple[str, str]]) -> list[str]:
    """The innermost frames of a stack, and the innermost one of the user's own code."""
    shown = [words for _, words in frames[:_SHOWN]]
    own = next((words for file, words in frames if not file.startswith((*_STANDARD, _INSTALLED, _PACKAGE))), None)
    return shown if own is None or own in shown else [*shown[:-1], own]


def _waits(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether a thread in ``frames`` waits for other ranks: in this package's communication or torch's, directly or through the standard library."""
    files = (file for file, _ in frames if not file.startswith(_STANDARD) or _INSTALLED in file)
    return is_of_libraries(next(files, ""))
