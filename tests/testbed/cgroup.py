"""The CPU share of a testbed's host: a cgroup of the cpu controller, version 1 or 2.

It finds the hierarchy, sets quota and precedence over the rest of the machine, and kills the processes of a group. processes.py
starts processes in a group.

    hierarchy = find_cpu_hierarchy()
    group = CpuGroup(hierarchy, "holmes-demo/h0")
    group.create(share=0.45)
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

from testbed.errors import TestbedUnavailable

_KILL_TIMEOUT_S = 10.0
_PERIOD_US = 20_000  # short, which is closest to a slower core
_MOST_WEIGHT = {1: ("cpu.shares", 262144), 2: ("cpu.weight", 10000)}  # the largest values that the kernel accepts
_HELP = "the testbed gives each host a share of the CPU by a cgroup"


@dataclass(frozen=True, slots=True)
class CpuHierarchy:
    """The mount point of the cpu controller, and the version of its interface (1 or 2)."""

    root: Path
    version: int


def find_cpu_hierarchy() -> CpuHierarchy:
    """Find the mounted cpu controller. Raises TestbedUnavailable if there is none."""
    unified = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuHierarchy(Path(folder), 1)
        if kind == "cgroup2":
            unified.append(Path(folder))
    for root in unified:
        controllers = root / "cgroup.controllers"
        if controllers.is_file() and "cpu" in controllers.read_text().split():
            return CpuHierarchy(root, 2)
    raise TestbedUnavailable(f"no cgroup with the cpu controller is mounted; {_HELP}")


class CpuGroup:
    """A group of processes; `name` is its path below the hierarchy's root."""

    def __init__(self, hierarchy: CpuHierarchy, name: str) -> None:
        self.hierarchy = hierarchy
        self.path = hierarchy.root / name

    @property
    def procs(self) -> Path:
        """The file to which a process writes its id to join the group."""
        return self.path / "cgroup.procs"

    def create(self, share: float | None = None) -> None:
        """Create the group; its processes together get `share` cores, or no limit if None. Raises TestbedUnavailable."""
        try:
            if share is not None and self.hierarchy.version == 2:
                self._delegate()
            self.path.mkdir(parents=True, exist_ok=True)
            if share is None:
                return
            quota_us = round(_PERIOD_US * share)
            if self.hierarchy.version == 2:
                (self.path / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (self.path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self.path / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise TestbedUnavailable(
                f"the cgroup {self.path} cannot be made or given a quota ({error.strerror}); {_HELP}: it needs root, a "
                f"writable {self.hierarchy.root} and a kernel with CONFIG_CFS_BANDWIDTH"
            ) from error

    def precede(self) -> None:
        """Let the group's processes run, up to their quotas, before all other work on the machine. The group must exist."""
        name, weight = _MOST_WEIGHT[self.hierarchy.version]
        try:
            (self.path / name).write_text(str(weight))
        except OSError as error:
            raise TestbedUnavailable(f"{self.path / name} cannot be written ({error.strerror}); {_HELP}") from error

    def _delegate(self) -> None:
        """Enable the cpu controller at each level above the group, as version 2 requires."""
        below = self.path.relative_to(self.hierarchy.root).parts
        for depth in range(len(below)):
            folder = self.hierarchy.root.joinpath(*below[:depth])
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.subtree_control").write_text("+cpu")

    def pids(self) -> list[int]:
        """The ids of the processes in the group and in the groups below it."""
        found: list[int] = []
        for folder, _, _ in os.walk(self.path):
            try:
                found += map(int, Path(folder, "cgroup.procs").read_text().split())
            except OSError:
                pass  # the group was removed meanwhile
        return found

    def kill(self) -> None:
        """Kill every process of the group and of the groups below it; return when none is left, or after 10 s."""
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
        """Remove the group and the groups below it, if they exist."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for folder, _, _ in list(os.walk(self.path, topdown=False)):
            while True:
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError:  # busy: its last processes are still exiting
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)
