"""Ctrl-C while a process joins its job: it ends, also where a library waits for ranks that have ended by it already.

Python's handler runs between two of its own instructions, and torch waits for the other ranks in one: half an hour at worst. Later
the watch for failures ends such a rank (failure.py).

    with ends_by_interrupt():
        connect_world(...)
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

_GRACE_S = 5.0
_EXIT_CODE = 128 + signal.SIGINT


@contextlib.contextmanager
def ends_by_interrupt() -> Iterator[None]:
    """Inside, SIGINT ends the process within seconds, if KeyboardInterrupt does not. In another thread than the main one, or
    where somebody is told of signals already, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told, tells = socket.socketpair()
    tells.setblocking(False)
    before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    left = threading.Event()
    thread = threading.Thread(target=_watch, args=(told, left), name="holmes-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        if before == -1:
            signal.set_wakeup_fd(-1)
        tells.shutdown(socket.SHUT_RDWR)  # closing would not end the thread where a forked process holds it, too
        tells.close()
        thread.join()


def _watch(told: socket.socket, left: threading.Event) -> None:
    with told:
        while numbers := told.recv(64):
            if signal.SIGINT in numbers and not left.wait(_GRACE_S):
                print("ends by SIGINT, while it was waiting for other ranks to join", file=sys.stderr, flush=True)
                os._exit(_EXIT_CODE)
