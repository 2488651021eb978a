"""Staging: a copy of a rank's values that training does not change, and the thread that writes it.

The memory of the copies is reused: allocating it costs more than filling it.
"""

import contextlib
import copy
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_holmes.checkpoint.parts import Item, Value

_NICE = 10


class Staging:
    """Memory on the host for one copy of a rank's values."""

    def __init__(self) -> None:
        self._buffers: dict[Value, Tensor] = {}

    def copy(self, items: Iterable[Item]) -> list[Item]:
        """Copy the values as they are now; the copies are valid until the next call."""
        copies: list[Item] = []
        buffers: dict[Value, Tensor] = {}
        on_device = False
        for names, value in items:
            if isinstance(value, Tensor):
                buffer = self._buffers.get(names[0])
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    pinned = value.device.type == "cuda"
                    buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
                on_device |= value.device.type != "cpu"
                buffers[names[0]] = buffer.copy_(value.detach(), non_blocking=True)
                copies.append((names, buffer))
            else:
                copies.append((names, copy.deepcopy(value)))
        if on_device:
            torch.cuda.synchronize()
        self._buffers = buffers
        return copies


class Writer:
    """Runs one write at a time, in a thread if ``background`` is set, and keeps its exception for the next :meth:`wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._later: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.last_s = 0.0
        """Seconds that the last write in a thread took."""

    @property
    def is_busy(self) -> bool:
        """Whether a write is running in the thread."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, write: Callable[[], None], *, background: bool) -> None:
        """Wait for the previous write, and start this one. Raises the exception of the previous write."""
        self.wait()
        if not background:
            write()
            return
        # a daemon: if the process ends by an error, a write that waits for other ranks must not keep it alive
        self._thread = threading.Thread(target=self._run, args=(write,), name="holmes-checkpoint", daemon=True)
        self._thread.start()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run ``action`` once the current write has succeeded, or now if there is none. If the write fails, ``action`` is dropped,
        since it removes what the write was to replace."""
        with self._lock:
            if self._thread is not None:
                self._later.append(action)
                return
        action()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the current write, and raise its exception if it failed; after ``timeout_s`` warn and return."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                warnings.warn("a checkpoint was still being written when the run ended; it is not complete")
                return
            with self._lock:
                self._thread = None
                later, self._later = self._later, []
            if self._failure is None:
                for action in later:
                    action()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, write: Callable[[], None]) -> None:
        if sys.platform == "linux":  # on other systems the priority would be that of the whole process
            with contextlib.suppress(OSError):  # training, and other ranks that still copy, have priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        begin = time.monotonic()
        try:
            write()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self.last_s = time.monotonic() - begin
        while True:
            with self._lock:
                if not self._later:
                    return
                action = self._later.pop(0)
            try:
                action()
            except Exception as error:
                warnings.warn(f"an old checkpoint could not be removed: {error}")
