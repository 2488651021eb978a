"""What this process has freed and its C library has kept: given back to the system.

give_back_freed_memory()        # between two large values that are brought, used and let go of
"""

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """Return what is freed to the system: whole tensors, of which a rank keeps a part, leave holes between the parts, which
    glibc keeps; they came to as much as the parts."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
