"""StateFile: the file in which an optimizer node keeps its units, read and written by several requests in parallel.

    file = StateFile(folder / "0.states", 1 << 30)
    transfer = file.write(offset, buffer)              # a buffer of Memory; the offset is a multiple of PAGE
    transfer.wait()

The file uses O_DIRECT if the file system has it, so that nothing stays in the page cache, which would count as the node's memory; if
not, the cache is dropped after each request. Requests begin in the order in which they were made. FILE.mark, beside the file, tells
the commit of its contents, or that they are between two commits.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_holmes.comm.file_space import reserve
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.optim.node.buffers import PAGE, Memory

REQUEST_BYTES = 4 << 20
NUM_REQUESTS = 8
"""Requests in parallel; with fewer, a disk with a queue is slower (docs/log.md)."""
SUFFIX = ".holmes-states"
_MEASURED_BYTES = 128 << 20
_Act = Callable[[int, list[memoryview], int], int]


class Transfer:
    """A read or a write that is under way, as ``num_requests`` requests."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests
        self._error: HolmesError | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._then: list[Callable[[HolmesError | None], None]] = []

    def arrived(self, error: HolmesError | None) -> None:
        """Note that one request is done, or has failed with ``error``."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            self._done.set()
            waiting, self._then = self._then, []
        for act in waiting:
            act(self._error)

    def then(self, act: Callable[[HolmesError | None], None]) -> None:
        """Call ``act`` when all requests are done, with the first error, or None."""
        with self._lock:
            if self._left:
                self._then.append(act)
                return
        act(self._error)

    def wait(self) -> None:
        """Wait until all requests are done; raises the first error."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class StateFile:
    """A file of ``num_bytes`` at ``path``, whose disk space is reserved at once.

    Raises:
        ConfigurationError: the folder cannot be written to, or does not have the space.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_left_over(path.parent)
            free = shutil.disk_usage(path.parent).free
            new = path.with_suffix(".new")
            self._fd, self.is_direct = _open(new)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(path)  # locked by now, so that no other node takes it for a left-over file
        except OSError as error:
            raise ConfigurationError(
                f"optimizer states cannot be kept in {str(path.parent)!r}: {error}; name a folder of the node that it may write to"
            ) from error
        try:
            reserve(self._fd, num_bytes)
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"parameters and optimizer states need {num_bytes / 1e9:.2f} GB in {str(path.parent)!r}, which has "
                f"{free / 1e9:.2f} GB free ({error.strerror}): name a folder on a larger disk, or use more optimizer nodes"
            ) from error
        self._pool = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="holmes-node-disk")

    def extend(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` more; returns their offset."""
        start = self.num_bytes
        try:
            reserve(self._fd, start + num_bytes)
        except OSError as error:
            raise HolmesError(f"{self.path} cannot grow by {num_bytes / 1e9:.2f} GB: {error}") from error
        self.num_bytes += num_bytes
        return start

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        """Start to read into ``buffer``, whole pages of uint8."""
        return self._start(os.preadv, offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> Transfer:
        """Start to write ``buffer``, which must not change until the transfer is done."""
        return self._start(os.pwritev, offset, buffer)

    def _start(self, act: _Act, offset: int, buffer: Tensor) -> Transfer:
        memory = _bytes_of(buffer)
        starts = range(0, memory.nbytes, REQUEST_BYTES)
        transfer = Transfer(len(starts))
        for start in starts:
            self._pool.submit(self._request, transfer, act, offset + start, memory[start : start + REQUEST_BYTES])
        return transfer

    def _request(self, transfer: Transfer, act: _Act, offset: int, memory: memoryview) -> None:
        error: HolmesError | None = None
        try:
            start, left = offset, memory
            while left.nbytes:
                count = act(self._fd, [left], start)
                if count == 0:
                    raise OSError(f"it ends at {start}, before what was written there")
                start, left = start + count, left[count:]
            if not self.is_direct and hasattr(os, "posix_fadvise"):
                if act is os.pwritev:
                    os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, memory.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as failed:
            what = "written to" if act is os.pwritev else "read from"
            error = HolmesError(
                f"optimizer states cannot be {what} {self.path}: {failed}; the run can go on from its last checkpoint, with "
                f"another folder"
            )
        transfer.arrived(error)

    def mark(self, commit: int | None) -> None:
        """Write FILE.mark: the contents are of ``commit``; None: they are between two commits."""
        try:
            path = self.path.with_suffix(f"{SUFFIX}.mark")
            path.write_text(json.dumps({"commit": commit, "dirty": commit is None}))
        except OSError as error:
            raise HolmesError(
                f"{self.path} cannot be marked: {error}; the run can go on from its last checkpoint"
            ) from error

    def measure(self, memory: Memory) -> float:
        """Measure the bytes per second that the disk reads, and writes, while it does both at once. A part of the file is overwritten;
        the buffers take at most the free room of ``memory``."""
        size = max(PAGE, min(self.num_bytes, REQUEST_BYTES, memory.free // NUM_REQUESTS) // PAGE * PAGE)
        offsets = range(0, min(_MEASURED_BYTES, self.num_bytes - size + 1), size)
        buffers = [Memory(size).take(size) for _ in range(NUM_REQUESTS)]

        def run(place: int, acts: Sequence[_Act]) -> None:
            for offset in offsets[place::NUM_REQUESTS]:
                for act in acts:
                    transfer = Transfer(1)
                    self._request(transfer, act, offset, _bytes_of(buffers[place]))
                    transfer.wait()

        places = range(NUM_REQUESTS)
        list(
            self._pool.map(run, places, [[os.pwritev]] * NUM_REQUESTS)
        )  # write first: a read of a part that was never written does not access the disk
        began = time.perf_counter()
        list(self._pool.map(run, places, [[os.preadv, os.pwritev]] * NUM_REQUESTS))
        seconds = time.perf_counter() - began
        return len(offsets) * size / seconds

    def close(self) -> None:
        """Remove the file."""
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        _remove(self.path)


def _bytes_of(buffer: Tensor) -> memoryview:
    memory: Any = buffer.numpy()
    return memoryview(memory)


def _open(path: Path) -> tuple[int, bool]:
    """Create a file; returns its descriptor, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    if hasattr(os, "O_DIRECT"):
        memory = Memory(PAGE)
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
            try:
                os.pwritev(fd, [_bytes_of(memory.take(PAGE))], 0)
                return fd, True
            except OSError:
                os.close(fd)
        except OSError:
            pass  # not on this file system
    return os.open(path, flags, 0o600), False


def _remove(path: Path) -> None:
    for name in (path, path.with_suffix(f"{SUFFIX}.mark")):
        name.unlink(missing_ok=True)


def _remove_left_over(folder: Path) -> None:
    """Remove the files of nodes that were killed, which no process has locked."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)


def add_from(file: StateFile, offset: int, flat: Tensor, memory: Memory) -> None:
    """Add the elements in the file at ``offset`` to ``flat``, 1-D, of the same type, one piece at a time."""
    piece = memory.take(min(REQUEST_BYTES, -(-flat.nbytes // PAGE) * PAGE))
    step = piece.nbytes // flat.itemsize
    try:
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            size = -(-part.nbytes // PAGE) * PAGE
            file.read(offset + start * flat.itemsize, piece[:size]).wait()
            part.add_(piece.view(flat.dtype)[: part.numel()])
    finally:
        memory.give(piece)
