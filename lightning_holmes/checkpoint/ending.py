"""Detect at exit whether this process ends with an error: it decides whether a job's snapshots are kept.

    note_exits()
    ...
    atexit.register(lambda: print(why_not_well() or "well"))

Python keeps an uncaught exception (``sys.last_value``), but not SystemExit, so calls of ``sys.exit``, ``exit`` and ``quit`` are recorded.
``raise SystemExit(1)`` is not detected.
"""

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from lightning_holmes.comm.uncaught import one_line

_said: list[Any] = []
"""The argument of the main thread's last call of sys.exit; empty if there was none."""


def note_exits() -> None:
    """Record from now on the argument of ``sys.exit``, ``exit`` and ``quit``."""
    _said.clear()
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        leave = getattr(module, name, None)  # without the site module there is no builtins.exit
        if leave is not None and not getattr(leave, "is_ours", False):
            setattr(module, name, _noting(leave))


def _noting(leave: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(leave, assigned=("__doc__",), updated=())
    def noting(code: Any = None) -> Any:
        if threading.current_thread() is threading.main_thread():  # in another thread, sys.exit ends only that thread
            _said[:] = [code]
        leave(code)

    noting.is_ours = True  # type: ignore[attr-defined]
    return noting


def why_not_well() -> str:
    """Return the exception or the call that ends this process with an exit code other than 0; "" if none is known."""
    exception = getattr(sys, "last_value", None)
    if exception is not None:
        return one_line(exception)
    code = _said[0] if _said else None
    return "" if code is None or (isinstance(code, int) and code == 0) else f"sys.exit({code!r})"
