"""How this process ends, as far as that is known while it ends: what a job leaves behind depends on it.

    note_exits()
    ...
    atexit.register(lambda: print(why_not_well() or "well"))

Python tells an exception that nobody has caught (``sys.last_value``), but of SystemExit nothing: calls of ``sys.exit``, ``exit`` and ``quit`` are
noted. ``raise SystemExit(1)`` is not seen.
"""

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from lightning_holmes.comm.uncaught import one_line

_said: list[Any] = []
"""What the main thread has given to sys.exit last."""


def note_exits() -> None:
    """Note from now on what ``sys.exit`` is called with."""
    _said.clear()
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        leave = getattr(module, name, None)  # without the site module there is no builtins.exit
        if leave is not None and not getattr(leave, "is_ours", False):
            setattr(module, name, _noting(leave))


def _noting(leave: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(leave, assigned=("__doc__",), updated=())
    def noting(code: Any = None) -> Any:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends a thread
            _said[:] = [code]
        leave(code)

    noting.is_ours = True  # type: ignore[attr-defined]
    return noting


def why_not_well() -> str:
    """The exception or the call that ends this process with another exit code than 0; "": neither is known."""
    exception = getattr(sys, "last_value", None)
    if exception is not None:
        return one_line(exception)
    code = _said[0] if _said else None
    return "" if code is None or (isinstance(code, int) and code == 0) else f"sys.exit({code!r})"
