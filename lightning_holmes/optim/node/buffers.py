"""Memory: page-aligned buffers of an optimizer node, as O_DIRECT needs them, with a limit on their total bytes.

    memory = Memory(1 << 30)
    buffer = memory.take(5000)                  # 8192 bytes, uint8; waits while there is no room
    memory.give(buffer)

Buffers that are given back are kept for the next request of the same size: fresh memory costs a page fault for each 4 kB.
"""

import mmap
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_holmes.errors import ConnectionLostError

PAGE = 4096


class Transfer(Protocol):
    """A read that is under way."""

    def wait(self) -> None:
        """Wait until the read is done; raises its error."""


def pages(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Memory:
    """A pool of ``limit`` bytes, for any threads.

    Attributes:
        changed: the condition, with its lock, that guards this object; Values uses it, too.
        evict: gives back one buffer that is not in use; returns False if there is none. Called with ``changed`` held.
        peak: the most bytes that were taken at the same time.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self.changed = threading.Condition(threading.RLock())
        self.evict: Callable[[], bool] = lambda: False
        self._taken: dict[int, Tensor] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._num_kept = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed."""
        return self._is_closed

    @property
    def free(self) -> int:
        """The bytes that are not taken."""
        return self.limit - self.used

    def take(self, num_bytes: int, *, leave: int = 0, first: Callable[[], bool] = lambda: False) -> Tensor:
        """Wait until there is room, and return a buffer of at least ``num_bytes``.

        Args:
            leave: bytes that must stay free; ignored while ``first()`` is true.

        Raises:
            ConnectionLostError: the pool is closed.
        """
        with self.changed:
            while (found := self.try_to_take(num_bytes, leave=0 if first() else leave)) is None:
                self.changed.wait()
        return found

    def try_to_take(self, num_bytes: int, *, leave: int = 0) -> Tensor | None:
        """Return a buffer as :meth:`take` does; None if there is no room now."""
        size = pages(max(num_bytes, 1))
        assert size <= self.limit, f"{size} of {self.limit}"
        with self.changed:
            while self.used + size + leave > self.limit and not self._is_closed:
                if not self.evict():
                    return None
            if self._is_closed:
                raise ConnectionLostError("the optimizer node ends")
            self.used += size
            self.peak = max(self.peak, self.used)
            buffer = self._reuse(size)
            self._taken[buffer.data_ptr()] = buffer
        return buffer

    def _reuse(self, size: int) -> Tensor:
        same = self._kept.get(size)
        if same:
            self._num_kept -= size
            return same.pop()
        while self.used + self._num_kept > self.limit:
            largest = max(kept for kept, buffers in self._kept.items() if buffers)
            self._kept[largest].pop()
            self._num_kept -= largest
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def give(self, tensor: Tensor) -> None:
        """Give back a buffer that :meth:`take` returned, by itself or a view of its beginning; other tensors are ignored."""
        with self.changed:
            buffer = self._taken.pop(tensor.data_ptr(), None)
            if buffer is not None:
                self.used -= buffer.nbytes
                self._kept.setdefault(buffer.nbytes, []).append(buffer)
                self._num_kept += buffer.nbytes
                self.changed.notify_all()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole buffer of which ``tensor`` is a view of the beginning."""
        return self._taken[tensor.data_ptr()]

    def wake(self) -> None:
        """Let waiting threads check ``first`` again."""
        with self.changed:
            self.changed.notify_all()

    def trim(self) -> None:
        """Free the kept buffers."""
        with self.changed:
            self._kept.clear()
            self._num_kept = 0

    def close(self) -> None:
        """Close the pool: waiting and later :meth:`take` calls raise ConnectionLostError."""
        with self.changed:
            self._is_closed = True
            self.trim()
            self.changed.notify_all()


class Values:
    """An LRU cache in ``memory`` of the flat values of units, which are stored in a file.

    held = values.borrow(3, num_bytes, read)    # read(buffer) starts to read them, if they are not in memory
    held.wait()
    values.give_back(3)
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: dict[int, Held] = {}  # the least recently used first
        memory.evict = self._evict

    def borrow(self, index: int, num_bytes: int, read: Callable[[Tensor], Transfer] | None) -> "Held":
        """Borrow the values of unit ``index``; they stay in memory until they are given back as often as they were borrowed.

        Waits for memory.

        Args:
            read: starts to read the values into a buffer; None: the caller overwrites them.
        """
        with self._memory.changed:
            while (found := self.try_to_borrow(index, num_bytes, read)) is None:
                self._memory.changed.wait()
        return found

    def try_to_borrow(
        self, index: int, num_bytes: int, read: Callable[[Tensor], Transfer] | None, *, leave: int = 0
    ) -> "Held | None":
        """Borrow as :meth:`borrow` does; None if there is no room now for the values and ``leave`` more bytes."""
        with self._memory.changed:
            held = self._held.pop(index, None)
            if held is None:
                buffer = self._memory.try_to_take(num_bytes, leave=leave)
                if buffer is None:
                    return None
                held = Held(buffer, None if read is None else read(buffer))
            self._held[index] = held
            held.num_users += 1
        return held

    def give_back(self, index: int) -> None:
        """Give the values back; call once for each :meth:`borrow`."""
        with self._memory.changed:
            self._held[index].num_users -= 1
            self._memory.changed.notify_all()

    def _evict(self) -> bool:
        for index, held in self._held.items():
            if held.num_users == 0:
                del self._held[index]
                self._memory.give(held.buffer)
                return True
        return False

    def drop(self) -> None:
        """Free all values that are not borrowed."""
        with self._memory.changed:
            while self._evict():
                pass
            self._memory.trim()


class Held:
    """A ``buffer`` of :class:`Values`, borrowed ``num_users`` times; it is filled when ``wait`` returns."""

    def __init__(self, buffer: Tensor, transfer: Transfer | None) -> None:
        self.buffer = buffer
        self.num_users = 0
        self._transfer = transfer

    def wait(self) -> None:
        """Wait until the buffer is filled; raises the error of a failed read."""
        if self._transfer is not None:
            self._transfer.wait()
