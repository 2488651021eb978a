"""What a process shows of the exception that ends it: a line in place of its traceback, where another rank shows that.

Python prints an exception that nobody catches by ``sys.excepthook``. The hook that is set here looks for the exceptions that
were given a line, and hands any other to the hook before it.

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


def show_as(exception: BaseException, line: str) -> None:
    """If ``exception`` ends this process, or one that was raised while it was handled, print ``line`` alone."""
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
    """What :func:`show_as` was given for an exception, or for one that led to it."""
    while exception is not None:
        line: str | None = getattr(exception, _LINE, None)
        if line is not None:
            return line
        exception = exception.__cause__ or exception.__context__
    return None


def one_line(exception: BaseException) -> str:
    """Type and message, as the last line of a traceback has them, of which the first line."""
    message = str(exception).strip()
    return f"{type(exception).__name__}: {message.splitlines()[0]}" if message else type(exception).__name__


def _end_beside_threads() -> None:
    """Where an exception ends the process while a thread of this package still waits for others in torch's code: woken while the interpreter ends,
    the thread would be unwound through code that lets nothing through, which aborts the process (exit code -6; Python 3.11)."""
    waits = any(thread.daemon and thread.name.startswith("holmes") for thread in threading.enumerate())
    if waits and isinstance(getattr(sys, "last_value", None), Exception):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


atexit.register(_end_beside_threads)  # when it is imported, so that it comes after what others register later
