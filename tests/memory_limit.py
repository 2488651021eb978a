"""Memory limits for the processes of a test: one cgroup of the memory controller (version 1 or 2) for each process.

    with memory_limits(4, limit_bytes) as limits:
        launch_raw(4, "workers:run", {"limits": [limit.procs for limit in limits]}, ...)
        limits[0].kills                       # processes that the kernel has killed there

A process joins by writing its process id to ``procs``. Memory that it already holds then is not counted, neither in
version 1 nor in version 2, as pages stay with the group that they were charged to (docs.kernel.org: cgroup-v1/memory, cgroup-v2).
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def resident_mb(field: str) -> float:
    """Return a field of /proc/self/status in MB: VmRSS is this process's size, VmHWM the highest since it was reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


@dataclass(frozen=True)
class MemoryLimit:
    """One cgroup with a memory limit."""

    path: Path
    version: int

    @property
    def procs(self) -> str:
        """The path of the file to which a process writes its id to join."""
        return str(self.path / "cgroup.procs")

    @property
    def kills(self) -> int:
        """The number of processes that the kernel has killed in this cgroup because they ran out of memory."""
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(re.findall(r"^oom_kill (\d+)", text, re.MULTILINE)[0])


@contextlib.contextmanager
def memory_limits(count: int, limit_bytes: int) -> Iterator[list[MemoryLimit]]:
    """Create ``count`` cgroups with this limit each and no swap (version 2). Skips the test if they cannot be
    created."""
    root, version = _hierarchy()
    limits = [MemoryLimit(root / f"holmes-memory-{os.getpid()}-{rank}", version) for rank in range(count)]
    try:
        for limit in limits:
            limit.path.mkdir()
            if version == 1:
                (limit.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
            else:
                (limit.path / "memory.max").write_text(str(limit_bytes))
                (limit.path / "memory.swap.max").write_text("0")
        yield limits
    finally:
        for limit in limits:
            _remove(limit.path)


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 10
    while path.exists():
        try:
            path.rmdir()
        except OSError:  # busy: its last process has not ended yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _hierarchy() -> tuple[Path, int]:
    why = "no memory controller is mounted"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        root, version = Path(folder), 1
        if kind == "cgroup2":
            found, version = (root / "cgroup.subtree_control").read_text().split(), 2
        else:
            found = options.split(",") if kind == "cgroup" else []
        if "memory" in found:
            if os.access(root, os.W_OK) and os.geteuid() == 0:
                return root, version
            why = f"{root} cannot be written"
    if os.environ.get("HOLMES_REQUIRE_TESTBED"):
        pytest.fail(why)
    pytest.skip(why)
