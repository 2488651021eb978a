"""StateStore: the file and the memory of units that are kept on disk (stored_unit.py), and how the units share the memory.

The node's memory limit, less what its process uses already, is divided into three pools, so that none waits for memory of another:

    values      parameters that are fetched or stepped; as many as fit stay in memory
    states      states of units that are about to be stepped, are being stepped, or are being written
    gradients   gradients that have arrived and were not stepped yet; if memory is short, sums of units are written to the file

    store = StateStore(path, {0: needs}, limit_bytes=2 << 30, beside=1 << 20, num_workers=4, name="optimizer node 0")
    buffer = store.take_gradient(worker=1, num_bytes=4096)         # waits
    store.arrived(1, unit)                                         # the gradient was passed to the unit
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
"""Memory for other uses: torch code that is loaded at its first use, threads' stacks, messages, fragmentation by small allocations."""
ALIGNED = 256
"""The alignment of states in a unit's part of the file, in bytes."""
_SHARE_OF_HOST = 0.8  # of the host's free memory, if no limit is given


class StateStore:
    """The file and memory of the units of one service.

    Args:
        path: the path of the file, which is created.
        units: by number, the bytes of each unit's values, gradient and states.
        limit_bytes: the memory limit of the process.
        beside: the bytes that an update needs in addition to the pools.
        num_workers: the number of workers that send gradients, each in the same order.
        name: the name of the node and its workers, for messages.

    Raises:
        ConfigurationError: the disk does not have the space, or the limit is too low for the largest unit.
    """

    def __init__(
        self, path: Path, units: Mapping[int, "Needs"], *, limit_bytes: int, beside: int, num_workers: int, name: str
    ) -> None:
        self.largest = largest = {
            key: max(pages(u[key]) for u in units.values()) for key in ("values", "gradient", "states")
        }
        total = {key: sum(pages(u[key]) for u in units.values()) for key in largest}
        self.slot_bytes = largest["states"] + largest["gradient"]
        """The bytes of the largest unit's states and, if it was written to disk, the sum of its gradients."""
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
        """A pool for reading something piece by piece."""
        self.cache = Values(self.values)
        self.limit_bytes = limit_bytes
        self.moved_bytes = total["values"] + total["states"]
        """The bytes that an update of all units reads, and that it writes."""
        self.rate = self.file.measure(max(self.values, self.states, self.gradients, key=lambda memory: memory.limit))
        """The bytes per second that the disk reads, and writes, while it does both at once."""
        self._places = 0
        self._lock = threading.Lock()
        self._resting: dict[Unit, None] = {}  # the oldest first
        self._progress = [0] * num_workers
        self._is_dirty = False
        self.spills = gradients < best[2]
        """Whether gradients may have to be written to the file."""
        self.fail: Callable[[HolmesError], None] = lambda error: None
        """Called with a disk error that no caller waits for."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when memory has become free."""

    def place(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` in the file; returns their offset."""
        start = self._places
        self._places += pages(num_bytes)
        return start if self._places <= self.file.num_bytes else self.file.extend(pages(num_bytes))

    # gradients

    def begin_again(self, num_workers: int) -> None:
        """Prepare for ``num_workers`` new workers; no memory holds gradients then."""
        self.gradients = Memory(self.gradients.limit)
        self._resting.clear()
        self._progress = [0] * num_workers

    def take_gradient(self, worker: int, num_bytes: int) -> Tensor:
        """Return memory for the next gradient of ``worker``; waits until there is room.

        Room for two gradients is reserved for the worker that is furthest behind: its gradient is the next to be summed, so that
        memory becomes free and all workers can go on."""
        place = (self._progress[worker], worker)
        return self.gradients.take(
            num_bytes,
            leave=2 * self.largest["gradient"],
            first=lambda: place == min((p, w) for w, p in enumerate(self._progress)),
        )

    def arrived(self, worker: int, unit: Unit) -> None:
        """Note that a gradient of ``worker`` was passed to ``unit``. If memory is short, sums are written to the file, the oldest first."""
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
                return  # its memory becomes free when it is written

    # the file

    def dirty(self) -> None:
        """Mark the file as between two commits, before values or states of an unfinished step are written."""
        with self._lock:
            if not self._is_dirty:
                self.file.mark(None)
            self._is_dirty = True

    def commit(self, window: int) -> None:
        """Mark the file as of the commit ``window``, after everything of the step has been written."""
        with self._lock:
            self.file.mark(window)
            self._is_dirty = False

    def describe(self) -> str:
        """Describe the file, the memory pools and the speed of the disk, in words."""
        purses = ((self.values, "parameters"), (self.states, "states"), (self.gradients, "gradients"))
        parts = ", ".join(f"{memory.limit / 1e6:.0f} for {what}" for memory, what in purses)
        how = "past the page cache" if self.file.is_direct else "with the page cache dropped after each request"
        return (
            f"{self.file.num_bytes / 1e9:.3g} GB in {self.file.path.parent} {how}; of {self.limit_bytes / 1e6:.0f} MB of memory "
            f"{parts}; the disk gives {self.rate / 1e9:.2f} GB/s each way at once, so that an update takes at least "
            f"{self.moved_bytes / self.rate:.3g} s"
        )

    def compare(self, step_s: float) -> str:
        """Compare the disk speed that steps of ``step_s`` seconds need with that of the disk, in words."""
        return (
            f"a step takes {step_s:.3g} s, and its update moves {self.moved_bytes / 1e6:.3g} MB each way: "
            f"{self.moved_bytes / step_s / 1e9:.3g} GB/s, where the disk gives {self.rate / 1e9:.3g}"
        )

    def rest_from_now_on(self) -> None:
        """Free all buffers that are not in use."""
        self.cache.drop()
        for memory in (self.states, self.gradients):
            memory.trim()

    def stop_gradients(self) -> None:
        """Close the pool of gradients: threads that wait for its memory get a ConnectionLostError."""
        self.gradients.close()

    def stop(self) -> None:
        """Close all pools: threads that wait for memory get a ConnectionLostError."""
        for memory in (self.values, self.states, self.gradients, self.pieces):
            memory.close()

    def close(self) -> None:
        """Close all pools, and remove the file."""
        self.stop()
        self.file.close()


Needs = Mapping[str, int]
"""The bytes of a unit's "values", "gradient" and "states"."""


def needs_of(layout: UnitLayout, state_bytes: float) -> Needs:
    """Return the bytes that a unit needs; ``state_bytes``: the bytes of the optimizer's states for each element."""
    states = math.ceil(state_bytes * layout.numel) + 4 * ALIGNED * len(layout.names) if layout.is_trained else 0
    gradient = layout.numel * layout.gradient_dtype.itemsize if layout.is_trained else 0
    return {"values": layout.numel * layout.dtype.itemsize, "gradient": gradient, "states": states}


def share_out(room: int, levels: list[list[int]]) -> list[int]:
    """Divide ``room`` bytes among pools. The first of ``levels`` has the least bytes that each pool needs, later ones have better sizes;
    between two levels each pool gets the same fraction of the difference."""
    held = levels[0]
    for level in levels[1:]:
        wanted = [max(one, other) for one, other in zip(held, level, strict=True)]
        if sum(wanted) > room:
            part = (room - sum(held)) / max(sum(wanted) - sum(held), 1)
            return [one + int(part * (other - one)) // PAGE * PAGE for one, other in zip(held, wanted, strict=True)]
        held = wanted
    return held


def default_limit(num_on_host: int) -> int:
    """Return the memory limit of the process if none is given: an equal share, for each of ``num_on_host`` nodes, of 0.8 of the host's
    free memory."""
    return int(_SHARE_OF_HOST * psutil.virtual_memory().available) // num_on_host


def path_in(folder: str, name: str) -> Path:
    """Return a unique path for a service's file in ``folder``."""
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
