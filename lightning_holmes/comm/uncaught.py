"""Shows one line in place of the traceback of the exception that ends a process, if another rank shows the traceback.

Python prints an uncaught exception by ``sys.excepthook``. The hook that is set here prints the line of an exception
that was given one, and hands any other exception to the previous hook.

    show_as(error, "[rank 2] ends, because rank 0 failed: ZeroDivisionError: division by zero")
    raise error                                     # the line, and no traceback
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from types import TracebackType

_LINE = "_lightning_holmes_line"
_LAST_WAIT_S = 2.0


def show_as(exception: BaseException, line: str) -> None:
    """Print only ``line`` if ``exception``, or one that was raised while it was handled, ends this process."""
    setattr(exception, _LINE, line)
    before = sys.excepthook
    if getattr(before, "is_ours", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        line = line_of(value)
        if line is None:
            before(kind, value, trace)
        else:
            print(line, file=sys.stderr, flush=True)

    hook.is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def line_of(exception: BaseException | None) -> str | None:
    """The line that :func:`show_as` was given for an exception, or for one that led to it; None if there is none."""
    while exception is not None:
        line: str | None = getattr(exception, _LINE, None)
        if line is not None:
            return line
        exception = exception.__cause__ or exception.__context__
    return None


def one_line(exception: BaseException) -> str:
    """The type and the first line of the message, as at the end of a traceback."""
    message = str(exception).strip()
    return f"{type(exception).__name__}: {message.splitlines()[0]}" if message else type(exception).__name__


def _end_beside_threads() -> None:
    """End the process at once if an exception ends it while a thread of this package may still wait for others in
    torch's code: woken while the interpreter ends, the thread would be unwound through code that lets nothing through,
    which aborts the process (exit code -6; Python 3.11). If it ends otherwise (SIGTERM), wait a little for the thread."""
    waiting = [thread for thread in threading.enumerate() if thread.daemon and thread.name.startswith("holmes")]
    if waiting and isinstance(getattr(sys, "last_value", None), Exception):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)
    for thread in waiting:
        thread.join(_LAST_WAIT_S)


atexit.register(_end_beside_threads)  # at import, so that it runs after functions that are registered later
