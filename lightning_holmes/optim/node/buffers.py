"""Memory: buffers of an optimizer node, page-aligned as O_DIRECT wants them, of at most so many bytes at once.

    memory = Memory(1 << 30)
    buffer = memory.take(5000)                  # uint8, 8192 of them; waits while there is no room
    memory.give(buffer)

What is given back is kept for the next who wants as much: fresh memory costs a page fault each 4 kB.
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
    """A read under way."""

    def wait(self) -> None:
        """Raises what has failed."""


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Memory:
    """``limit`` bytes, for any threads.

    Attributes:
        changed: held while anything here changes; whoever evicts uses it, too.
        evict: gives something back that is kept for nobody; False if there is no such thing. Called with ``changed`` held.
        peak: the most bytes that were taken at once.
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
        """Nobody wants any more."""
        return self._is_closed

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self.limit - self.used

    def take(self, num_bytes: int, *, leave: int = 0, first: Callable[[], bool] = lambda: False) -> Tensor:
        """A buffer of at least ``num_bytes``, when there is room.

        Args:
            leave: bytes that shall be free after it; none need be while ``first``.

        Raises:
            ConnectionLostError: nobody wants it any more.
        """
        with self.changed:
            while (found := self.try_to_take(num_bytes, leave=0 if first() else leave)) is None:
                self.changed.wait()
        return found

    def try_to_take(self, num_bytes: int, *, leave: int = 0) -> Tensor | None:
        """The same, if there is room now."""
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
        """Back what :meth:`take` gave, or a view of its beginning; other tensors are nobody's."""
        with self.changed:
            buffer = self._taken.pop(tensor.data_ptr(), None)
            if buffer is not None:
                self.used -= buffer.nbytes
                self._kept.setdefault(buffer.nbytes, []).append(buffer)
                self._num_kept += buffer.nbytes
                self.changed.notify_all()

    def whole(self, tensor: Tensor) -> Tensor:
        """The buffer at whose beginning ``tensor`` lies."""
        return self._taken[tensor.data_ptr()]

    def wake(self) -> None:
        """Somebody may be the first now."""
        with self.changed:
            self.changed.notify_all()

    def trim(self) -> None:
        """Give what is kept back to the system."""
        with self.changed:
            self._kept.clear()
            self._num_kept = 0

    def close(self) -> None:
        """Whoever waits is told."""
        with self.changed:
            self._is_closed = True
            self.trim()
            self.changed.notify_all()


class Values:
    """Flat values of units, which lie in a file: those that were used last stay in ``memory`` as long as there is room.

    held = values.borrow(3, num_bytes, read)    # read(buffer) starts to bring them, if they are not here
    held.wait()
    values.give_back(3)
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: dict[int, Held] = {}  # the least recently used first
        memory.evict = self._evict

    def borrow(self, index: int, num_bytes: int, read: Callable[[Tensor], Transfer] | None) -> "Held":
        """The values of unit ``index``, which stay until they are given back as often as they were borrowed; waits for memory.

        Args:
            read: None: whoever borrows writes them first.
        """
        with self._memory.changed:
            while (found := self.try_to_borrow(index, num_bytes, read)) is None:
                self._memory.changed.wait()
        return found

    def try_to_borrow(
        self, index: int, num_bytes: int, read: Callable[[Tensor], Transfer] | None, *, leave: int = 0
    ) -> "Held | None":
        """The same, if there is room now, and ``leave`` bytes beside."""
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
        """Once for each :meth:`borrow`."""
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
        """Keep nothing that nobody uses."""
        with self._memory.changed:
            while self._evict():
                pass
            self._memory.trim()


class Held:
    """A ``buffer`` of :class:`Values`, which ``num_users`` have borrowed; there when ``wait`` returns."""

    def __init__(self, buffer: Tensor, transfer: Transfer | None) -> None:
        self.buffer = buffer
        self.num_users = 0
        self._transfer = transfer

    def wait(self) -> None:
        """Raises what the disk says."""
        if self._transfer is not None:
            self._transfer.wait()
