"""Ctrl-C and SIGTERM while Python's signal handler cannot run: handlers run between two Python instructions, and torch waits for other ranks inside of one.

with ends_by_interrupt():                   # Ctrl-C ends a process that joins its job within seconds, not after half an hour
    connect_world(...)
with ends_by_second_signal([SIGINT]):       # the first Ctrl-C is left to a handler, which lets the process end in good order
    ...
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator

_GRACE_S = 5.0


@contextlib.contextmanager
def ends_by_interrupt() -> Iterator[None]:
    """Inside, SIGINT ends the process within seconds, if KeyboardInterrupt does not. Does nothing in another thread
    than the main one, or if a signal wakeup descriptor is set already."""
    left = threading.Event()

    def hear(number: int) -> None:
        if number == signal.SIGINT and not left.wait(_GRACE_S):
            _end(number, "ends by SIGINT, while it was waiting for other ranks to join")

    with _hearing(hear, left.set):
        yield


@contextlib.contextmanager
def ends_by_second_signal(numbers: Collection[int]) -> Iterator[None]:
    """Inside, the second signal of one of ``numbers`` ends the process at once, whatever it is doing; of SIGTERM one that comes five seconds or more
    after the first (launcher and scheduler may both pass one on). Does nothing in the same cases as :func:`ends_by_interrupt`."""
    first: dict[int, float] = {}

    def hear(number: int) -> None:
        since = time.monotonic() - first.setdefault(number, time.monotonic())
        if number in numbers and since > (_GRACE_S if number == signal.SIGTERM else 0):
            _end(number, f"ends by the second {signal.Signals(number).name}")

    with _hearing(hear):
        yield


@contextlib.contextmanager
def _hearing(hear: Callable[[int], None], leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, call ``hear`` in a thread with the number of each signal; call ``leave`` before the thread is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told, tells = socket.socketpair()
    tells.setblocking(False)
    before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)

    def watch() -> None:
        with told:
            while numbers := told.recv(64):
                for number in numbers:
                    hear(number)

    thread = threading.Thread(target=watch, name="holmes-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leave()
        if before == -1:
            signal.set_wakeup_fd(-1)
        tells.shutdown(socket.SHUT_RDWR)  # closing would not end the thread if a forked process holds the socket, too
        tells.close()
        thread.join()


def _end(number: int, why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(128 + number)
