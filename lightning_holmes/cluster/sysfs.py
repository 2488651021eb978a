"""SysfsReader: reads small files of /sys and /proc, and lists those that could not be read.

Nothing here raises for a missing or forbidden file: it gives a warning that names the file.

    reader = SysfsReader()
    reader.text("/sys/class/net/eth0/mtu")      # "1500", or None with a line in reader.warnings
"""

from __future__ import annotations

import contextlib
import os
import re

_MAX_BYTES = 4096
_MAX_WARNINGS = 50


class SysfsReader:
    """Reads files, and collects warnings about files that could not be read."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        """Add a warning, once, up to _MAX_WARNINGS in total."""
        if message not in self.warnings and len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(message)

    def text(self, path: str, *, optional: bool = False) -> str | None:
        """The stripped text of a file; None, with a warning unless ``optional``, if it cannot be read."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(descriptor, _MAX_BYTES).decode("utf-8", "replace").strip("\0 \t\r\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            if not optional:
                self.warn(f"{path}: {error.strerror or error}")
            return None

    def names(self, path: str, *, optional: bool = False) -> list[str]:
        """The entries of a folder in natural order; empty if it cannot be read. An ``optional`` folder may be missing without a warning."""
        try:
            return sorted(os.listdir(path), key=natural_key)
        except OSError as error:
            if not (optional and isinstance(error, (FileNotFoundError, NotADirectoryError))):
                self.warn(f"{path}: {error.strerror or error}")
            return []

    def number(self, path: str, *, optional: bool = False) -> int | None:
        """Read a whole number, decimal or with 0x; None if there is none."""
        text = self.text(path, optional=optional)
        if text is None:
            return None
        with contextlib.suppress(ValueError):
            return int(text, 0)
        self.warn(f"{path}: {text[:40]!r} is not a number")
        return None


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts mlx5_2 before mlx5_10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)
