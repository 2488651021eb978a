"""Disk space for files, reserved before they are written to."""

import os


def reserve(descriptor: int, num_bytes: int) -> None:
    """Reserve ``num_bytes`` of disk space for a file, which gets that size: later writes find room, also those through
    a memory map, where a full file system would end the process by SIGBUS.

    Raises:
        OSError: there is not enough space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
    else:
        os.ftruncate(descriptor, num_bytes)
