"""The hosts of a soak job: each has its own small tmpfs for snapshots, and all share one for checkpoints.

with Hosts(folder, layout) as hosts:
    pid = hosts.start(folder / "attempt0", 1, layout, port, {})     # rank 1
    hosts.lose(1)
"""

import contextlib
import shutil
import subprocess
from pathlib import Path

from faults import Layout
from launch import start_worker
from snapshot_cases import snapshots_in
from testbed import Testbed, TestbedOptions
from testbed.netlink import namespace_path

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology

_MEMORY = "4m"


class Hosts:
    """Context manager that mounts the file systems of a layout."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self.seen = folder / "memory"
        self.own = [folder / f"memory.{host}" for host in range(layout.hosts)]
        self.checkpoints = folder / "checkpoints"
        self.bed: Testbed | None = None
        self._mounts = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        self.seen.mkdir(parents=True)
        for path in (*self.own, self.checkpoints):
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_MEMORY}", "soak", path], check=True, timeout=10)
            self._mounts.callback(subprocess.run, ["umount", "-l", path], check=True, timeout=10)
        if self.layout.clusters:
            self.bed = self._mounts.enter_context(Testbed(_topology(self.layout), TestbedOptions()))
        return self

    def start(self, folder: Path, rank: int, layout: Layout, port: int, environment: dict[str, str]) -> int:
        """Start a rank on its host and return its process id."""
        env = dict(environment)
        number = layout.host_of(rank)
        ranks = layout.ranks_of(number)
        if self.bed is not None:
            host = self.bed.layout.hosts[number]
            env |= {
                "HOLMES_HOST_NAME": host.name,
                "HOLMES_SYSFS_ROOT": str(self.bed.sysfs_root(host.name)),
                "SOAK_NAMESPACE": namespace_path(host.namespace),
                "SOAK_HOSTS_FILE": str(self.bed._hosts_file),
                "MASTER_ADDR": self.bed.layout.hosts[0].ethernet.address,
                "LOCAL_RANK": str(rank - ranks[0]),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "GROUP_RANK": str(number),
            }
        return start_worker(folder, rank, layout.size, port, env)

    def switch(self, host: int, *, up: bool) -> None:
        """Switch a host's Ethernet card up or down."""
        assert self.bed is not None
        found = self.bed.layout.hosts[host]
        (self.bed.set_up if up else self.bed.set_down)(
            f"{found.name}.{next(nic.name for nic in found.nics if nic.kind == 'ethernet')}"
        )

    def __exit__(self, *_: object) -> None:
        self._mounts.close()

    @staticmethod
    def fill(path: Path) -> None:
        """Fill the file system at ``path``."""
        with (path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65536)

    @staticmethod
    def free(path: Path) -> None:
        (path / "filler").unlink(missing_ok=True)

    def lose(self, host: int) -> None:
        """Delete the snapshots of a host, as if it had been switched off."""
        for path in self.own[host].glob("*/"):
            shutil.rmtree(path)

    def damage(self, host: int, *, cut: bool, chance: int) -> bool:
        """Truncate a file of the host's newest snapshot, or change one of its bytes; return whether this was the
        host's only snapshot."""
        steps = snapshots_in(self.own[host])
        files = sorted(path for path in (steps[-1].iterdir() if steps else ()) if path.stat().st_size)
        if files:
            path = files[chance % len(files)]
            data = bytearray(path.read_bytes())
            place = chance % len(data)
            data[place] ^= 0 if cut else 0xFF
            path.write_bytes(data[:place] if cut else data)
        return len(steps) == 1


def _topology(layout: Layout) -> Topology:
    """Return a topology whose hosts have one fast card and one Ethernet card each."""
    nics = (Nic(name="mlx5_0", kind="roce"), Nic(name="eth0", kind="ethernet"))
    each = layout.hosts // layout.clusters
    return Topology(
        clusters=tuple(
            Cluster(
                name=name,
                hosts=tuple(
                    Host(name=f"{name}{n}", devices=layout.size // layout.hosts, nics=nics) for n in range(each)
                ),
            )
            for name in "abcd"[: layout.clusters]
        )
    )
