"""The folder of a testbed, /run/holmes-testbed/ID (or below $XDG_RUNTIME_DIR), and the process that it belongs to."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from testbed.errors import TestbedUnavailable
from testbed.layout import PREFIX

_OWNER = "owner"  # process id and start time, which distinguishes it from a later process with the same id


def runtime_folder() -> Path:
    """The folder for the files of testbeds. Raises TestbedUnavailable if none is writable."""
    for base in (Path("/run"), Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")):
        if base.is_dir() and os.access(base, os.W_OK):
            return base / f"{PREFIX}testbed"
    raise TestbedUnavailable("no testbed here: neither /run nor $XDG_RUNTIME_DIR can be written to; run it as root")


def bed_folder(bed_id: str) -> Path:
    """The folder of one testbed."""
    return runtime_folder() / bed_id


def make_folder(bed_id: str) -> None:
    """Make the folder of a testbed that belongs to the calling process."""
    folder = bed_folder(bed_id)
    while not folder.is_dir():  # the parent folder is removed with the last testbed
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
    (folder / _OWNER).write_text(f"{os.getpid()} {_start_ticks(os.getpid())}")


def abandoned() -> list[str]:
    """The ids of the testbeds whose process has ended."""
    folder = runtime_folder()
    return sorted(path.name for path in folder.iterdir() if not _is_owned(path)) if folder.is_dir() else []


def remove_folder(bed_id: str) -> None:
    """Remove the folder of a testbed, if it exists."""
    shutil.rmtree(bed_folder(bed_id), ignore_errors=True)
    with contextlib.suppress(OSError):  # the folders of other testbeds are still in it
        runtime_folder().rmdir()


def _is_owned(folder: Path) -> bool:
    try:
        pid, ticks = (folder / _OWNER).read_text().split()
    except (OSError, ValueError):
        return True  # being made or removed
    return str(_start_ticks(int(pid))) == ticks


def _start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name, in parentheses, may contain any character; after it, the state is the first field, the start time the 20th
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
