"""The job's store: requests to it that return in limited time, and a watch of the process that keeps it.

torch's client of the store (2.13) waits for an answer without a limit: if the link is cut, ``wait`` reports a timeout
and never returns, and if the store's process is gone, ``clone`` tries to connect for the timeout of WORLD.

    answer_within(lambda: store.wait([key], timeout), timeout_s=31.0)
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_holmes.errors import ConnectionLostError

T = TypeVar("T")
_CONNECT_S = 5.0


def end_of(store: Any) -> tuple[str, int] | None:
    """Host and port of the store's process; None for a store that no process keeps."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def answer_within(ask: Callable[[], T], *, timeout_s: float) -> T:
    """Return what ``ask()`` returns, or raise what it raises. It runs in a thread, which is abandoned if it takes longer.

    Raises:
        ConnectionLostError: it took longer than ``timeout_s``.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="holmes-store-request", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise ConnectionLostError(
            f"the job's store has not answered for {timeout_s:.0f} s: the network to the host that keeps it, that of rank 0, is "
            f"cut, or that host hangs"
        )
    return answers[0]


def is_gone(store: Any) -> bool:
    """Whether the process that keeps ``store`` has ended; checked without the store's client, which would print a
    stack. May hang if the link is cut."""
    end = end_of(store)
    try:
        if end is not None:
            socket.create_connection(end).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # the link may come back
        pass
    return False


class StoreWatch:
    """A thread that watches the store's process until it is gone, or :meth:`stop`.

    A connection on which nothing is ever sent ends with the process at its other end. A process that is stopped, or
    whose host is cut off, does not end it: ``on_second`` looks for that.

    Args:
        store: a TCPStore, or prefixes of one; any other store is not watched.
        on_gone: called once, in the thread.
        on_second: called about once a second, in the thread; returns whether to go on watching.
    """

    def __init__(self, store: Any, on_gone: Callable[[], None], on_second: Callable[[], bool]) -> None:
        self._on_gone, self._on_second = on_gone, on_second
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        end = end_of(store)
        with contextlib.suppress(OSError):  # a store that cannot be connected to is noticed by requests
            if end is not None:
                self._connection = socket.create_connection(end, timeout=_CONNECT_S)
                self._thread = threading.Thread(target=self._watch, name="holmes-store-watch", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        with self._connection, self._woken:
            while not (ready := select.select([self._connection, self._woken], [], [], 1.0)[0]):
                if not self._on_second():
                    return
            if self._woken not in ready:  # the store says nothing unasked
                self._on_gone()

    def stop(self) -> None:
        """End the thread; does not wait if it is the calling one."""
        with contextlib.suppress(OSError):  # it has been stopped before
            self._wake.shutdown(socket.SHUT_RDWR)  # closing would not do: forked data workers hold the socket, too
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
