"""Stalls: finds which rank keeps the others waiting, and what it is doing.

When the training thread has waited in one place for half of the timeout, its rank asks all ranks through the job's
store. Each rank's failure watch answers with the stack of its own training thread, even if that thread hangs. Ranks
that do not answer at all are named for that.

    stalls = Stalls(store, "holmes/run/1", rank=0, world_size=4, timeout_s=1800.0)
    stalls.look()               # once a second, by another thread
    stalls.told                 # "rank 3 on host b1, in step 120, does not come: it is in loader.py:33 read < ..."

Only ranks that wait in this package or in torch.distributed ask: a wait for a device (NCCL's) looks like computing.
"""

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_holmes.comm.lost import is_of_libraries

_BUSY = 0.05  # a thread that computes for more than this part of the time does not wait
_ANSWER_S = 3.0  # each rank looks once a second
_SHOWN = 5  # frames of a stack, and ranks, that a message shows
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, "<")
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Stalls:
    """The stalls of one run, as seen by this rank.

    Args:
        store: the job's store; used only in the thread that calls :meth:`look`.
        prefix: the prefix of this run's keys in the store.
        timeout_s: of transfers; None: no rank ever asks.

    Attributes:
        told: the present stall in one line, as far as it is known; empty if there is none.
        silent: the ranks that did not answer this rank's question, in the present stall.
        place: returns where the training thread is, in words.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, world_size: int, timeout_s: float | None) -> None:
        self.told = ""
        self.silent: frozenset[int] = frozenset()
        self.place: Callable[[], str] = lambda: ""
        self._store, self._prefix = store, f"{prefix}/stall"
        self._rank, self._world_size = rank, world_size
        self._patience_s = None if timeout_s is None else timeout_s / 2
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if hasattr(time, "pthread_getcpuclockid") else None
        self._at: int | None = None  # the frame that waits
        self._since = self._looked = time.monotonic()
        self._computed = self._cpu_s()
        self._number = 1  # of the next question
        self._asks_since: float | None = None  # this rank has asked, and gathers the answers
        self._hears: int | None = None  # the question whose result this rank waits for
        self._known: float | None = None  # since when this rank had waited when the last question was asked
        if self._patience_s is not None:
            store.set(f"{self._prefix}/host/{rank}", json.dumps(socket.gethostname()))

    def waits(self) -> bool:
        """Whether the training thread waits for other ranks now."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and _waits(frame)

    def look(self) -> None:
        """Ask all ranks if this rank has waited for long, answer a question if there is one, and read its result."""
        if self._patience_s is None:
            return
        frame = sys._current_frames().get(self._thread)
        waits = frame is not None and _waits(frame)
        waited_s = self._note(id(frame) if waits else None)
        question = f"{self._prefix}/{self._number}"
        if self._since != self._known and waited_s > self._patience_s:
            if self._store.add(f"{question}/askers", 1) == 1:
                self._asks_since = time.monotonic()
            self._store.set(f"{question}/asked", "1")
        if self._store.check([f"{question}/asked"]):
            stack = [] if frame is None else _stack_of(frame)
            self._store.set(f"{question}/answer/{self._rank}", json.dumps([waits, self.place(), stack]))
            self._known, self._hears, self._number = self._since, self._number, self._number + 1
        elif self._hears is not None:
            self._hear(f"{self._prefix}/{self._hears}", waited_s)

    def _note(self, at: int | None) -> float:
        """Note the frame in which the training thread waits now (``at``; None: it does not); return for how many seconds it has waited there."""
        now, computed = time.monotonic(), self._cpu_s()
        is_busy = computed - self._computed > _BUSY * (now - self._looked)
        if at is None or at != self._at or is_busy:
            self._since = now
        if (at is None or is_busy) and self._asks_since is None:
            self.told, self.silent, self._hears = "", frozenset(), None  # the stall is over
        self._at, self._computed, self._looked = at, computed, now
        return now - self._since

    def _cpu_s(self) -> float:
        """The CPU seconds of the training thread."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def _hear(self, question: str, waited_s: float) -> None:
        """Combine the answers if this rank has asked; else read the result of the rank that has."""
        result = f"{question}/result"
        if self._asks_since is None:
            if self._store.check([result]):
                self.told, self._hears = json.loads(self._store.get(result)), None
        elif time.monotonic() - self._asks_since > _ANSWER_S:
            self._asks_since = self._hears = None
            answers = {}
            for rank in range(self._world_size):
                key = f"{question}/answer/{rank}"
                answers[rank] = json.loads(self._store.get(key)) if self._store.check([key]) else None
            self.silent = frozenset(rank for rank, answer in answers.items() if answer is None)
            self.told = _describe(answers, self._host_of)
            self._store.set(result, json.dumps(self.told))
            print(f"[rank {self._rank}] has waited for {waited_s:.0f} s: {self.told}", file=sys.stderr, flush=True)

    def _host_of(self, rank: int) -> str:
        key = f"{self._prefix}/host/{rank}"
        return str(json.loads(self._store.get(key))) if self._store.check([key]) else "that is not known"


def _describe(answers: dict[int, Any], host_of: Callable[[int], str]) -> str:
    """Which ranks are late and what they do, and which do not answer; if there are none, what each rank waits in."""
    silent = [rank for rank, answer in answers.items() if answer is None]
    late = [rank for rank, answer in answers.items() if answer is not None and not answer[0]]
    told = [
        f"rank {rank} on host {host_of(rank)} does not answer: it is stopped or swapped out, or its host is cut off"
        for rank in silent[:_SHOWN]
    ]
    for rank in (late or ([] if silent else list(answers)))[:_SHOWN]:
        _, place, stack = answers[rank]
        does = "does not come: it is in" if late else "waits for others in"
        told.append(f"rank {rank} on host {host_of(rank)}{place and ', ' + place + ','} {does} {' < '.join(stack)}")
    left = len(silent or late or answers) - _SHOWN
    return "; ".join(told) + (f"; and {left} more" if left > 0 else "")


def _stack_of(frame: FrameType) -> list[str]:
    """The innermost frames of a stack, and the innermost one of the user's own code."""
    frames: list[tuple[str, str]] = []
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        frames.append((code.co_filename, f"{os.path.basename(code.co_filename)}:{at.f_lineno} {code.co_name}"))
        at = at.f_back
    shown = [words for _, words in frames[:_SHOWN]]
    own = next((words for file, words in frames if not file.startswith((*_STANDARD, _INSTALLED, _PACKAGE))), None)
    return shown if own is None or own in shown else [*shown[:-1], own]


def _waits(frame: FrameType) -> bool:
    """Whether a thread at ``frame`` waits for other ranks: in this package's communication or torch's, directly or through the standard library."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_STANDARD) and _INSTALLED not in at.f_code.co_filename:
        at = at.f_back
    return at is not None and is_of_libraries(at.f_code.co_filename)
