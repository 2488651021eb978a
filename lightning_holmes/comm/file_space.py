"""Room in files, taken before it is written to."""

import os


def reserve(descriptor: int, num_bytes: int) -> None:
    """Let a file have so many bytes from now on: what is written there later finds room, also through memory that the file is, where a full
    file system ends the process by SIGBUS.

    Raises:
        OSError: there is no such room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
    else:
        os.ftruncate(descriptor, num_bytes)
