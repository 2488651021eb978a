"""Where an optimizer node keeps the sections of its units: Memory, or a Disk with limited memory.

    storage = Disk("/nvme/states", {0: {"values": 400, "gradient": 400, "states": 800}}, limit_bytes=..., beside=..., scratch=..., name="...")
    storage.prefetch(0, "states")                                  # starts to read, if there is room
    with storage.borrow(0, "values", "states", written=("values", "states")) as (values, states): ...      # uint8
    storage.forget(0, "gradient")

A disk's memory is a cache of whole sections. What was written is on its way to the disk when ``borrow`` ends, except gradients, which are
written only if their room is needed: most are used before. All buffers that a ``borrow`` needs are taken at once, so that none waits for
memory with some in hand. The file has no name: nothing is left of a node that was killed, and no run can go on from half a step.
It bypasses the page cache (O_DIRECT), which would count as the node's memory; where a file system cannot, the cache is dropped.
"""

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_holmes.comm.file_space import reserve
from lightning_holmes.comm.freed_memory import free_at_once
from lightning_holmes.errors import ConfigurationError, HolmesError

ALIGNED = 256
"""The alignment of states in a section, in bytes."""
_PAGE = 4096
_REQUEST_BYTES = 4 << 20
_NUM_REQUESTS = 8  # with fewer in parallel a disk with a queue is slower (docs/log.md)
_OTHER_BYTES = 96 << 20  # torch code that is loaded at its first use, threads' stacks, messages, fragmentation

Needs = Mapping[str, int]
"""The bytes of a unit's "values", "gradient" and "states"."""


class Memory:
    """All sections in memory, allocated when they are borrowed first; ``needs``: as for a Disk."""

    on_disk = False

    def __init__(self, needs: Mapping[int, Needs]) -> None:
        self._needs = needs
        self._held: dict[tuple[int, str], Tensor] = {}
        self._free: dict[int, list[Tensor]] = {}  # by size: fresh memory costs a page fault for each 4 kB
        self.fail: Callable[[BaseException], None] = lambda error: None
        """Called with the error of a write, for which nobody waits."""

    def describe(self) -> str:
        """Describe where sections are, if not in memory."""
        return ""

    @contextlib.contextmanager
    def borrow(
        self, index: int, *sections: str, fresh: Collection[str] = (), written: Collection[str] = ()
    ) -> Iterator[list[Tensor]]:
        """Yield the buffers of some sections of a unit, uint8; ``fresh``: their contents do not matter; ``written``: they change inside."""
        for section in sections:
            if (index, section) not in self._held:
                size = self._needs[index][section]
                free = self._free.get(size)
                self._held[index, section] = free.pop() if free else torch.zeros(size, dtype=torch.uint8)
        yield [self._held[index, section] for section in sections]

    def prefetch(self, index: int, *sections: str) -> None:
        """Start to read sections that are on the disk, if there is room without waiting."""

    def forget(self, index: int, section: str) -> None:
        """Note that a section is not needed any more; nobody may use it."""
        buffer = self._held.pop((index, section), None)
        if buffer is not None:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def rest(self) -> None:
        """Free all memory that nobody uses."""
        self._free.clear()

    def close(self) -> None:
        """Free everything."""
        self._held.clear()
        self._free.clear()


@dataclass(slots=True, eq=False)
class _Entry:
    """A section in memory: who uses it, its reads and writes that are under way, and whether it has changed since it was written."""

    buffer: Tensor
    offset: int
    users: int = 0
    reads: list["Future[None]"] = field(default_factory=list)
    writes: list["Future[None]"] = field(default_factory=list)
    is_dirty: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.users and all(transfer.done() for transfer in (*self.reads, *self.writes))


class Disk(Memory):
    """Sections in a file of ``folder``.

    Args:
        needs: the bytes of each unit's sections.
        limit_bytes: the memory of the process at most.
        beside: the bytes that an update needs beside its sections.
        scratch: the bytes of buffers for gradients that arrive.
        name: the name of the node and its workers, for messages.

    Raises:
        ConfigurationError: the folder cannot be written to, the disk is too small, or the limit too low for the largest unit.
    """

    on_disk = True

    def __init__(
        self, folder: str, needs: Mapping[int, Needs], *, limit_bytes: int, beside: int, scratch: int, name: str
    ) -> None:
        super().__init__({i: {key: _pages(size) for key, size in unit.items()} for i, unit in needs.items()})
        largest = {key: max(unit[key] for unit in self._needs.values()) for key in ("values", "gradient", "states")}
        resident = psutil.Process().memory_info().rss
        # two units are sent, one receives gradients, one is stepped
        least = 3 * largest["values"] + 2 * largest["gradient"] + largest["states"]
        self._limit = limit_bytes - resident - beside - scratch - _OTHER_BYTES
        if self._limit < least:
            raise ConfigurationError(
                f"{name}: --memory {limit_bytes / 1e6:.0f}M is not enough: the process has {resident / 1e6:.0f} MB before it holds "
                f"anything, and its largest unit ({largest['values'] / 1e6:.1f} MB of parameters) needs "
                f"{(least + limit_bytes - self._limit - resident) / 1e6:.0f} MB beside that; give it "
                f"{(least + limit_bytes - self._limit) / 1e6:.0f}M, or split large layers"
            )
        self._offsets, self.num_bytes = dict[tuple[int, str], int](), 0
        for index, unit in self._needs.items():
            for section, size in unit.items():
                self._offsets[index, section] = self.num_bytes
                self.num_bytes += size
        free_at_once()
        self._folder = folder
        self._fd, self._is_direct = self._open()
        self._pool = ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="holmes-node-disk")
        self._changed = threading.Condition()
        self._cache: OrderedDict[tuple[int, str], _Entry] = OrderedDict()  # the least recently used first
        self._stored: set[tuple[int, str]] = set()
        self._used = 0

    def _open(self) -> tuple[int, bool]:
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            with tempfile.NamedTemporaryFile(
                suffix=".holmes-states", dir=self._folder
            ) as named:  # the name goes at the end
                file, is_direct = _open_direct(named.name), True
                if file is None:
                    file, is_direct = os.open(named.name, os.O_RDWR), False
        except OSError as error:
            raise ConfigurationError(
                f"optimizer states cannot be kept in {self._folder!r}: {error}; name a folder of the node that it may write to"
            ) from error
        try:
            reserve(file, self.num_bytes)
        except OSError as error:
            os.close(file)
            raise ConfigurationError(
                f"parameters and optimizer states need {self.num_bytes / 1e9:.2f} GB in {self._folder!r}, which has "
                f"{free / 1e9:.2f} GB free ({error.strerror}): name a folder on a larger disk, or use more optimizer nodes"
            ) from error
        return file, is_direct

    def describe(self) -> str:
        how = "past the page cache" if self._is_direct else "with the page cache dropped after each request"
        return f"{self.num_bytes / 1e9:.3g} GB in {self._folder} {how}, through {self._limit / 1e6:.0f} MB of memory"

    @contextlib.contextmanager
    def borrow(
        self, index: int, *sections: str, fresh: Collection[str] = (), written: Collection[str] = ()
    ) -> Iterator[list[Tensor]]:
        """See Memory; sections are read from the disk unless they are in memory or ``fresh``. Waits for memory."""
        with self._changed:
            while (entries := self._take(index, sections, fresh)) is None:
                self._changed.wait()
        try:
            for section, entry in zip(sections, entries, strict=True):
                for transfer in (*entry.reads, *(entry.writes if section in written else ())):
                    transfer.result()
            yield [entry.buffer for entry in entries]
            for section, entry in zip(sections, entries, strict=True):
                entry.is_dirty |= section in written
                if entry.is_dirty and section != "gradient":
                    self._write((index, section), entry)
        finally:
            with self._changed:
                for entry in entries:
                    entry.users -= 1
                self._changed.notify_all()

    def prefetch(self, index: int, *sections: str) -> None:
        with self._changed:
            entries = self._take(index, [s for s in sections if (index, s) in self._stored], ())
            for entry in entries or ():
                entry.users -= 1

    def forget(self, index: int, section: str) -> None:
        with self._changed:
            self._stored.discard((index, section))
            entry = self._cache.get((index, section))
            if entry is not None:
                entry.is_dirty = False
                self._cache.move_to_end((index, section), last=False)
                self._changed.notify_all()

    def _take(self, index: int, sections: Collection[str], fresh: Collection[str]) -> list[_Entry] | None:
        """Return the entries of all sections, each with one more user, and start to read what is missing; None if there is no room now."""
        keys = [(index, section) for section in sections]
        here = [self._cache[key] for key in keys if key in self._cache]
        for entry in here:
            entry.users += 1  # not to be evicted
        missing = {key: self._needs[index][key[1]] for key in keys if key not in self._cache}
        freed = self._make_room(sum(missing.values()))
        if freed is None:
            for entry in here:
                entry.users -= 1
            return None
        for key, size in missing.items():
            same = next((i for i, buffer in enumerate(freed) if buffer.numel() == size), None)
            buffer = _allocate(size) if same is None else freed.pop(same)  # fresh memory costs page faults
            entry = self._cache[key] = _Entry(buffer, self._offsets[key], users=1)
            self._used += size
            if key in self._stored and key[1] not in fresh:
                entry.reads = self._transfer(os.preadv, entry)
        for key in keys:
            self._cache.move_to_end(key)
        return [self._cache[key] for key in keys]

    def _make_room(self, num_bytes: int) -> list[Tensor] | None:
        """Drop sections until there is room, the least recently used first; returns their buffers, or None if there is not enough room."""
        freed: list[Tensor] = []
        for key, entry in list(self._cache.items()):
            if self._used + num_bytes <= self._limit:
                break
            if entry.is_dirty and entry.is_idle:
                self._write(key, entry)  # it can be dropped when it is written
            elif entry.is_idle:
                del self._cache[key]
                self._used -= entry.buffer.numel()
                freed.append(entry.buffer)
        return freed if self._used + num_bytes <= self._limit else None

    def _write(self, key: tuple[int, str], entry: _Entry) -> None:
        with self._changed:
            self._stored.add(key)
            entry.is_dirty = False
            entry.writes = self._transfer(os.pwritev, entry)

    def _transfer(self, act: Callable[..., int], entry: _Entry) -> list["Future[None]"]:
        memory = _bytes_of(entry.buffer)
        starts = range(0, memory.nbytes, _REQUEST_BYTES)
        parts = [(entry.offset + start, memory[start : start + _REQUEST_BYTES]) for start in starts]
        transfers = [self._pool.submit(self._request, act, *part) for part in parts]
        for transfer in transfers:
            transfer.add_done_callback(self._done)
        return transfers

    def _done(self, transfer: "Future[None]") -> None:
        error = None if transfer.cancelled() else transfer.exception()
        if error is not None:
            self.fail(error)
        with self._changed:
            self._changed.notify_all()

    def _request(self, act: Callable[..., int], offset: int, memory: memoryview) -> None:
        start, left = offset, memory
        try:
            while left.nbytes:
                count = act(self._fd, [left], start)
                if count == 0:
                    raise OSError(f"it ends at {start}, before what was written there")
                start, left = start + count, left[count:]
            if not self._is_direct and hasattr(os, "posix_fadvise"):
                if act is os.pwritev:
                    os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, memory.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as failed:
            what = "written to" if act is os.pwritev else "read from"
            raise HolmesError(
                f"optimizer states cannot be {what} {self._folder}: {failed}; the run can go on from its last checkpoint, with "
                f"another folder"
            ) from failed

    def rest(self) -> None:
        with self._changed:
            self._limit, limit = 0, self._limit
            self._make_room(0)
            self._limit = limit

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._cache.clear()


def _open_direct(path: str) -> int | None:
    """Open a file for requests past the page cache; None if its file system has none, which may show only at the first write."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwritev(file, [_bytes_of(_allocate(_PAGE))], 0)
                return file
            except OSError:
                os.close(file)
    return None


def _pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE


def _allocate(num_bytes: int) -> Tensor:
    """Return memory that begins at a page, as O_DIRECT needs it."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _bytes_of(buffer: Tensor) -> memoryview:
    memory: Any = buffer.numpy()
    return memoryview(memory)
