"""The share of the CPU that a host of the testbed has: a cgroup of the cpu controller, version 1 or 2.

Owns finding the hierarchy, the quota, precedence before the rest of the machine, and ending what runs in a group; who joins a group is processes.py's.

    hierarchy = find_cpu_hierarchy()
    group = CpuGroup(hierarchy, "holmes-demo/h0")
    group.create(share=0.45, period_s=0.02)
    group.kill()
    group.remove()

Version 1: cpu.cfs_quota_us, cpu.cfs_period_us and cpu.shares; version 2: cpu.max and cpu.weight (docs.kernel.org,
scheduler/sched-bwc and admin-guide/cgroup-v2).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_holmes.errors import TestbedUnavailable

_KILL_TIMEOUT_S = 10.0
_MOST_WEIGHT = {1: ("cpu.shares", 262144), 2: ("cpu.weight", 10000)}  # the most that the kernel takes
_HELP = "the testbed gives each host a share of the CPU by a cgroup"


@dataclass(frozen=True, slots=True)
class CpuHierarchy:
    """Where the cpu controller is mounted, and which of the two interfaces it has."""

    root: Path
    version: int


def find_cpu_hierarchy(mounts: Path = Path("/proc/self/mounts")) -> CpuHierarchy:
    """The mounted cpu controller. Raises TestbedUnavailable if there is none."""
    unified = []
    for line in mounts.read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuHierarchy(Path(folder), 1)
        if kind == "cgroup2":
            unified.append(Path(folder))
    for root in unified:
        controllers = root / "cgroup.controllers"
        if controllers.is_file() and "cpu" in controllers.read_text().split():
            return CpuHierarchy(root, 2)
    raise TestbedUnavailable(f"no cgroup with the cpu controller is mounted ({mounts}); {_HELP}")


class CpuGroup:
    """A group of processes; `name` is its path below the hierarchy's root."""

    def __init__(self, hierarchy: CpuHierarchy, name: str) -> None:
        self.hierarchy = hierarchy
        self.path = hierarchy.root / name

    @property
    def procs(self) -> Path:
        """The file that a process joins by writing its id."""
        return self.path / "cgroup.procs"

    def create(self, *, share: float | None = None, period_s: float = 0.02) -> None:
        """Make the group; its processes together get `share` cores, or all there is."""
        try:
            if share is not None and self.hierarchy.version == 2:
                self._delegate()
            self.path.mkdir(parents=True, exist_ok=True)
            if share is None:
                return
            period_us = round(1e6 * period_s)
            quota_us = round(1e6 * period_s * share)
            if self.hierarchy.version == 2:
                (self.path / "cpu.max").write_text(f"{quota_us} {period_us}")
            else:
                (self.path / "cpu.cfs_period_us").write_text(str(period_us))
                (self.path / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise TestbedUnavailable(
                f"the cgroup {self.path} cannot be made or given a quota ({error.strerror}); {_HELP}: it needs root, a "
                f"writable {self.hierarchy.root} and a kernel with CONFIG_CFS_BANDWIDTH"
            ) from error

    def precede(self) -> None:
        """Give the group's processes what their quotas allow before all other work on the machine. It has to be there."""
        name, weight = _MOST_WEIGHT[self.hierarchy.version]
        try:
            (self.path / name).write_text(str(weight))
        except OSError as error:
            raise TestbedUnavailable(f"{self.path / name} cannot be written ({error.strerror}); {_HELP}") from error

    def _delegate(self) -> None:
        """Version 2 hands a controller down a level at a time."""
        below = self.path.relative_to(self.hierarchy.root).parts
        for depth in range(len(below)):
            folder = self.hierarchy.root.joinpath(*below[:depth])
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.subtree_control").write_text("+cpu")

    def pids(self) -> list[int]:
        """The processes in the group and in the groups below it."""
        found: list[int] = []
        for folder, _, _ in os.walk(self.path):
            try:
                found += map(int, Path(folder, "cgroup.procs").read_text().split())
            except OSError:
                pass  # the group went meanwhile
        return found

    def kill(self) -> None:
        """End every process of the group and of those below it; returns when none is left, or after 10 s."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)  # a killed process stays listed until it is gone

    def remove(self) -> None:
        """Remove the group and those below it; there may be none."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for folder, _, _ in list(os.walk(self.path, topdown=False)):
            while True:
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError:  # busy: its last processes are still on their way out
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)
