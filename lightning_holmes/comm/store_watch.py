"""StoreWatch: notices at once when the process that keeps the job's store is gone.

torch's client of the store notices only at its next request, and prints a stack each time. A connection on which
nothing is ever sent ends with the process at its other end, and a thread that waits for that costs nothing.

    watch = StoreWatch(store, lambda: ...)       # called once, in the thread
    watch.stop()
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_CONNECT_S = 5.0


class StoreWatch:
    """Watches the store's process until it is gone, or :meth:`stop`.

    A cut link to the process is not reported: it may come back.

    Args:
        store: a TCPStore, or prefixes of one; any other store is not watched.
        on_gone: called once, in the watch's thread.
    """

    def __init__(self, store: Any, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone
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
            ready, _, _ = select.select([self._connection, self._woken], [], [])
            if self._woken not in ready:  # the store says nothing unasked
                self._on_gone()

    def stop(self) -> None:
        """End the thread; does not wait if it is the calling one."""
        with contextlib.suppress(OSError):  # it has been stopped before
            self._wake.shutdown(socket.SHUT_RDWR)  # closing would not do: forked data workers hold the socket, too
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def end_of(store: Any) -> tuple[str, int] | None:
    """Host and port of the store's process; None for a store that no process keeps."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]
