"""What this process has freed and its C library has kept: given back to the system.

give_back_freed_memory()        # between two large values that are brought, used and let go of
free_at_once()                  # from now on what is large is given back when it is freed
"""

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 400_000


def give_back_freed_memory() -> None:
    """Return what is freed to the system: whole tensors, of which a rank keeps a part, leave holes between the parts, which
    glibc keeps; they came to as much as the parts."""
    _tell_glibc("malloc_trim", 0)


def free_at_once() -> None:
    """Let this process give large allocations back to the system when they are freed. By itself glibc, once such a one was freed, takes
    the next ones from the heap of the thread that asks, where they leave holes: 140 MB in a node of 24 units of 4 MB."""
    _tell_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def _tell_glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        getattr(ctypes.CDLL(None), function)(*arguments)
