"""StateStore: the file and the memory of units that live out of core (stored_unit.py), and how they share that memory.

The node's limit, less what its process has already, goes to three purses, so that none waits for what another one holds:

    values      parameters that are asked for, or stepped: as many as fit stay
    states      of units that are about to be stepped, are, or are being written
    gradients   that have come and were not stepped yet; those of finished units are written to the file where it gets tight

    store = StateStore(folder, "0", layouts, state_bytes=8.0, limit_bytes=2 << 30, num_workers=4)
    buffer = store.take_gradient(worker=1, num_bytes=4096)         # waits
    store.arrived(1, unit)                                         # it is in the unit's sum
"""

import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from torch import Tensor

from lightning_holmes.comm.freed_memory import free_at_once
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.optim.node.buffers import PAGE, Memory, Values, pages
from lightning_holmes.optim.node.description import UnitLayout
from lightning_holmes.optim.node.disk import REQUEST_BYTES, SUFFIX, StateFile
from lightning_holmes.optim.node.unit import Unit

_OTHER_BYTES = 96 << 20
"""Code of torch that is read at its first use, threads' stacks, messages, what small allocations leave behind."""
ALIGNED = 256
"""Bytes, between states in a unit's part of the file."""
_SHARE_OF_HOST = 0.8  # where no limit is given


class StateStore:
    """Of one service. ``units``: the bytes of each one's values, gradients and states.

    Args:
        path: of the file, which is made anew.
        limit_bytes: of the process's memory.
        beside: bytes that an update takes beside all of these.
        num_workers: who send gradients, each in the same order.

    Raises:
        ConfigurationError: the disk has not the space, or the limit is too low for the largest unit.
    """

    def __init__(
        self, path: Path, units: Mapping[int, "Needs"], *, limit_bytes: int, beside: int, num_workers: int, name: str
    ) -> None:
        self.largest = largest = {
            key: max(pages(u[key]) for u in units.values()) for key in ("values", "gradient", "states")
        }
        total = {key: sum(pages(u[key]) for u in units.values()) for key in largest}
        self.slot_bytes = largest["states"] + largest["gradient"]
        """Of a unit's states, and of the sum of its gradients where that was written."""
        resident = psutil.Process().memory_info().rss
        room = limit_bytes - resident - beside - _OTHER_BYTES - REQUEST_BYTES
        least = [2 * largest["values"], self.slot_bytes, 3 * largest["gradient"]]
        if room < sum(least):
            raise ConfigurationError(
                f"{name}: --memory {limit_bytes / 1e6:.0f}M is not enough: the process has {resident / 1e6:.0f} MB before it holds "
                f"anything, and its largest unit ({largest['values'] / 1e6:.1f} MB of parameters) needs "
                f"{(limit_bytes - room + sum(least) - resident) / 1e6:.0f} MB beside that; give it "
                f"{(limit_bytes - room + sum(least)) / 1e6:.0f}M, or split large layers"
            )
        better = [4 * largest["values"], 4 * self.slot_bytes, 4 * largest["gradient"]]
        best = [2 * largest["values"] + total["values"], better[1], 3 * largest["gradient"] + total["gradient"]]
        values, states, gradients = share_out(room, [least, better, best])
        free_at_once()
        self.file = StateFile(path, sum(total.values()))
        self.values, self.states, self.gradients = Memory(values), Memory(states), Memory(gradients)
        self.pieces = Memory(pages(REQUEST_BYTES))
        """For who reads something a piece after the other."""
        self.cache = Values(self.values)
        self.limit_bytes = limit_bytes
        self.moved_bytes = total["values"] + total["states"]
        """Of an update, each way."""
        self.rate = self.file.measure(max(self.values, self.states, self.gradients, key=lambda memory: memory.limit))
        """Bytes a second that the disk gives each way while both go at once."""
        self._places = 0
        self._lock = threading.Lock()
        self._resting: dict[Unit, None] = {}  # the oldest first
        self._progress = [0] * num_workers
        self._is_dirty = False
        self.spills = gradients < best[2]
        """Whether gradients may be written."""
        self.fail: Callable[[HolmesError], None] = lambda error: None
        """Told what the disk says where nobody waits for it."""
        self.on_room: Callable[[], None] = lambda: None
        """Told when memory has become free."""

    def place(self, num_bytes: int) -> int:
        """Where so many bytes of a unit shall lie in the file."""
        start = self._places
        self._places += pages(num_bytes)
        return start if self._places <= self.file.num_bytes else self.file.extend(pages(num_bytes))

    # gradients

    def begin_again(self, num_workers: int) -> None:
        """The workers are others, so many; no memory holds gradients."""
        self.gradients = Memory(self.gradients.limit)
        self._resting.clear()
        self._progress = [0] * num_workers

    def take_gradient(self, worker: int, num_bytes: int) -> Tensor:
        """Memory for what ``worker`` sends next. Two gradients' room is left for who is the furthest behind: it is its turn, so
        that its gradient goes into a sum at once, and everybody comes on."""
        place = (self._progress[worker], worker)
        return self.gradients.take(
            num_bytes,
            leave=2 * self.largest["gradient"],
            first=lambda: place == min((p, w) for w, p in enumerate(self._progress)),
        )

    def arrived(self, worker: int, unit: Unit) -> None:
        """It has been summed, or waits for those before it. Where memory is short, sums are written, the oldest first."""
        self._progress[worker] += 1
        self.gradients.wake()
        if not self.spills or self.gradients.is_closed:
            return
        with self._lock:
            self._resting.pop(unit, None)
            self._resting[unit] = None
        while self.gradients.free < 3 * self.largest["gradient"]:
            with self._lock:
                oldest = next(iter(self._resting), None)
                if oldest is not None:
                    del self._resting[oldest]
            if oldest is None or oldest.spill():
                return  # its memory comes back when it is written

    # the file

    def dirty(self) -> None:
        """Something is about to be written that belongs to no commit yet."""
        with self._lock:
            if not self._is_dirty:
                self.file.mark(None)
            self._is_dirty = True

    def commit(self, window: int) -> None:
        """All of a step has been written."""
        with self._lock:
            self.file.mark(window)
            self._is_dirty = False

    def describe(self) -> str:
        """Where and with how much memory, and how fast, in words."""
        purses = ((self.values, "parameters"), (self.states, "states"), (self.gradients, "gradients"))
        parts = ", ".join(f"{memory.limit / 1e6:.0f} for {what}" for memory, what in purses)
        how = "past the page cache" if self.file.is_direct else "with the page cache dropped after each request"
        return (
            f"{self.file.num_bytes / 1e9:.3g} GB in {self.file.path.parent} {how}; of {self.limit_bytes / 1e6:.0f} MB of memory "
            f"{parts}; the disk gives {self.rate / 1e9:.2f} GB/s each way at once, so that an update takes at least "
            f"{self.moved_bytes / self.rate:.3g} s"
        )

    def compare(self, step_s: float) -> str:
        """What steps of so many seconds need, beside what there is, in words."""
        return (
            f"a step takes {step_s:.3g} s, and its update moves {self.moved_bytes / 1e6:.3g} MB each way: "
            f"{self.moved_bytes / step_s / 1e9:.3g} GB/s, where the disk gives {self.rate / 1e9:.3g}"
        )

    def rest_from_now_on(self) -> None:
        """Keep no memory that is not asked for."""
        self.cache.drop()
        for memory in (self.states, self.gradients):
            memory.trim()

    def stop_gradients(self) -> None:
        """Whoever waits for memory for gradients is told that no more come."""
        self.gradients.close()

    def stop(self) -> None:
        """Whoever waits for memory is told that the service has ended."""
        for memory in (self.values, self.states, self.gradients, self.pieces):
            memory.close()

    def close(self) -> None:
        """Remove the file."""
        self.stop()
        self.file.close()


Needs = Mapping[str, int]
"""Bytes of a unit's "values", "gradient" and "states"."""


def needs_of(layout: UnitLayout, state_bytes: float) -> Needs:
    """``state_bytes``: of the optimizer's states, for each element."""
    states = math.ceil(state_bytes * layout.numel) + 4 * ALIGNED * len(layout.names) if layout.is_trained else 0
    gradient = layout.numel * layout.gradient_dtype.itemsize if layout.is_trained else 0
    return {"values": layout.numel * layout.dtype.itemsize, "gradient": gradient, "states": states}


def share_out(room: int, levels: list[list[int]]) -> list[int]:
    """``room`` bytes among purses: the first of ``levels`` is what they need, each next one what is better; on the way from one to
    the next all grow alike."""
    held = levels[0]
    for level in levels[1:]:
        wanted = [max(one, other) for one, other in zip(held, level, strict=True)]
        if sum(wanted) > room:
            part = (room - sum(held)) / max(sum(wanted) - sum(held), 1)
            return [one + int(part * (other - one)) // PAGE * PAGE for one, other in zip(held, wanted, strict=True)]
        held = wanted
    return held


def default_limit(num_on_host: int) -> int:
    """Of the process's memory where none is given: most of what the host has free, for each of so many nodes."""
    return int(_SHARE_OF_HOST * psutil.virtual_memory().available) // num_on_host


def path_in(folder: str, name: str) -> Path:
    """Of a service's file, which no other one has."""
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
