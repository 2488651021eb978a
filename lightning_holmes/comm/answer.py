"""Requests to the job's store that return in limited time, even if its link is cut or its process is gone.

torch's client of the store (2.13) waits for an answer without a limit: if the link is cut, ``wait`` reports a timeout
and never returns, and if the store's process is gone, ``clone`` tries to connect for the timeout of WORLD.

    answer_within(lambda: store.wait([key], timeout), timeout_s=31.0)
"""

import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_holmes.comm.store_watch import end_of
from lightning_holmes.errors import ConnectionLostError

T = TypeVar("T")


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
