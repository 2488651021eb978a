"""Returns memory to the system that this process has freed and its C library keeps.

give_back_freed_memory()        # between two large values that are loaded, used and dropped
free_at_once()                  # from now on large allocations are returned when they are freed
"""

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 400_000


def give_back_freed_memory() -> None:
    """Return freed memory to the system: whole tensors, of which a rank keeps a part, leave holes between the parts;
    glibc keeps these holes, which were as large as the parts."""
    _tell_glibc("malloc_trim", 0)


def free_at_once() -> None:
    """Make this process return large allocations to the system when they are freed. By default glibc, once such an
    allocation was freed, takes later ones from the heap of the calling thread, where they leave holes: 140 MB in a node
    of 24 units of 4 MB."""
    _tell_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def _tell_glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        getattr(ctypes.CDLL(None), function)(*arguments)
