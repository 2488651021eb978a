"""The saved state of a testbed, so that another command, or a command after a crash, finds the testbed.

It owns the folder of a testbed, /run/holmes-testbed/ID (or below $XDG_RUNTIME_DIR), and the file state.json in it.

    state = BedState(bed_id="demo", topology=topology, options=TestbedOptions(), owner=None)
    write_state(state)
    read_state("holmes-", "demo") == state
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lightning_holmes.cluster.record import read_json, record, to_json
from lightning_holmes.cluster.testbed.layout import TestbedOptions
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import TestbedUnavailable

_STATE = "state.json"


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that a testbed belongs to; the start time distinguishes it from a later process with the same id."""

    pid: int
    start_ticks: int

    @classmethod
    def this_process(cls) -> Owner:
        """The calling process."""
        ticks = _start_ticks(os.getpid())
        assert ticks is not None
        return cls(pid=os.getpid(), start_ticks=ticks)

    @property
    def alive(self) -> bool:
        """Whether this process still runs."""
        return _start_ticks(self.pid) == self.start_ticks


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class BedState:
    """A testbed's topology and options, and later changes. A testbed without an owner stays until it is taken down."""

    bed_id: str
    topology: Topology
    options: TestbedOptions
    owner: Owner | None
    rates: dict[str, float] = field(default_factory=dict)  # "host.nic": bytes/s, where changed
    down: tuple[str, ...] = ()


def runtime_folder(prefix: str) -> Path:
    """The folder for the files of testbeds with this prefix. Raises TestbedUnavailable if none is writable."""
    for base in (Path("/run"), Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")):
        if base.is_dir() and os.access(base, os.W_OK):
            return base / f"{prefix}testbed"
    raise TestbedUnavailable("no testbed here: neither /run nor $XDG_RUNTIME_DIR can be written to; run it as root")


def bed_folder(prefix: str, bed_id: str) -> Path:
    """The folder of one testbed."""
    return runtime_folder(prefix) / bed_id


def write_state(state: BedState) -> None:
    """Write the state atomically: a reader sees either the old state or the new one."""
    folder = bed_folder(state.options.prefix, state.bed_id)
    while not folder.is_dir():  # the parent folder is removed with the last testbed
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{_STATE}.{os.getpid()}"
    written.write_text(to_json(state))
    written.replace(folder / _STATE)


def read_state(prefix: str, bed_id: str) -> BedState | None:
    """The state of a testbed; None if there is none or it cannot be read."""
    try:
        return read_json(BedState, (bed_folder(prefix, bed_id) / _STATE).read_text(), source=f"testbed {bed_id}")
    except (OSError, ValueError):
        return None


def bed_ids(prefix: str) -> list[str]:
    """The ids of all testbeds that have a folder."""
    folder = runtime_folder(prefix)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def remove_folder(prefix: str, bed_id: str) -> None:
    """Remove the folder of a testbed, if it exists."""
    shutil.rmtree(bed_folder(prefix, bed_id), ignore_errors=True)
    with contextlib.suppress(OSError):  # the folders of other testbeds are still in it
        runtime_folder(prefix).rmdir()


def _start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name, in parentheses, may contain any character; after it, the state is the first field, the start time the 20th
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
