"""Ctrl-C where Python's handler does not come to it: that runs between two of its own instructions, and torch waits for other ranks in one.

with ends_by_interrupt():                   # a process that joins its job ends by it within seconds, and not after half an hour
    connect_world(...)
with ends_by_second_interrupt():            # the first one is left to a handler, which lets the process end in good order
    ...
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

_GRACE_S = 5.0
_EXIT_CODE = 128 + signal.SIGINT


@contextlib.contextmanager
def ends_by_interrupt() -> Iterator[None]:
    """Inside, SIGINT ends the process within seconds, if KeyboardInterrupt does not. In another thread than the main one, or
    where somebody is told of signals already, nothing is changed."""
    left = threading.Event()

    def hear(count: int) -> None:
        if not left.wait(_GRACE_S):
            _end("ends by SIGINT, while it was waiting for other ranks to join")

    with _hearing(hear, left.set):
        yield


@contextlib.contextmanager
def ends_by_second_interrupt() -> Iterator[None]:
    """Inside, the second SIGINT ends the process at once, whatever it is doing. Likewise nothing is changed elsewhere."""

    def hear(count: int) -> None:
        if count > 1:
            _end("ends by the second SIGINT")

    with _hearing(hear):
        yield


@contextlib.contextmanager
def _hearing(hear: Callable[[int], None], leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, ``hear`` is called in a thread for each SIGINT, with their number so far; ``leave`` before the thread is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told, tells = socket.socketpair()
    tells.setblocking(False)
    before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)

    def watch() -> None:
        count = 0
        with told:
            while numbers := told.recv(64):
                for _ in range(numbers.count(signal.SIGINT)):
                    count += 1
                    hear(count)

    thread = threading.Thread(target=watch, name="holmes-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leave()
        if before == -1:
            signal.set_wakeup_fd(-1)
        tells.shutdown(socket.SHUT_RDWR)  # closing would not end the thread where a forked process holds it, too
        tells.close()
        thread.join()


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
