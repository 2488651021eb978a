"""Snapshots: checkpoint folders in the memory of the hosts, from which a job that is started again resumes.

    manager = SnapshotManager(clusters)                   # saves as CheckpointManager does, in a thread
    manager.save_folder(member, checkpoint, folder.snapshot(fit, step), ...)
    found = find_newest(folder, fit, member.all_gather)      # (path, step) of the newest whole snapshot, or None

Every host has its ranks' files, and copies of other ranks' files (copies.py). The newest two snapshots are kept: the older one until the
newer is whole everywhere.
"""

import contextlib
import shutil
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.copies import Copies, partner_of
from lightning_holmes.checkpoint.job_folder import JobFolder
from lightning_holmes.checkpoint.manager import CheckpointManager
from lightning_holmes.checkpoint.manifest import REST, Manifest
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.parts import num_bytes
from lightning_holmes.checkpoint.saving import FolderSave
from lightning_holmes.errors import CheckpointError, ConfigurationError

_ROOM = 1.05  # factor on the bytes written, for headers and the manifest


def find_newest(folder: JobFolder, fit: int, all_gather: Callable[[Any], list[Any]]) -> tuple[Path, int] | None:
    """Return the newest snapshot of which the job's present hosts together hold every part, and its step. All ranks must call."""
    here: list[tuple[int, str, list[str], list[str]]] = []
    for step, path in folder.snapshots(fit).items():
        with contextlib.suppress(CheckpointError):
            manifest = Manifest.load(path)
            needed = [name for name, file in manifest.files.items() if file.file_system is not None or name == REST]
            here.append((step, manifest.id, needed, sorted(manifest.present_files(path))))
    missing: dict[tuple[int, str], set[str]] = {}
    for of_rank in all_gather(here):
        for step, token, needed, present in of_rank:
            missing[step, token] = missing.get((step, token), set(needed)) - set(present)
    whole = max((snapshot for snapshot, lacking in missing.items() if not lacking), default=None)
    if whole is None:
        return None
    step, chosen = whole
    path = folder.snapshot(fit, step)
    if any(own == step and token != chosen for own, token, *_ in here):
        atomic.delete(path)  # this host's is of another start, and was not completed on all hosts
    return path, step


class SnapshotManager(CheckpointManager):
    """Saves snapshots in a thread. If a snapshot cannot be written, a warning says so, and the one before it is kept.

    Args:
        clusters: the cluster number of each rank.

    Attributes:
        whole: the newest snapshot that is whole on all hosts.
        write_s: seconds that it took to be written in the background.
    """

    group_name = "holmes_snapshots"

    def __init__(self, clusters: Sequence[int]) -> None:
        super().__init__(distributed=True, background=True)
        self._clusters = clusters
        self._copies: Copies | None = None
        self._has_room = False
        self._latest: Path | None = None  # the latest snapshot; it may still be being written
        self.whole: Path | None = None
        self.write_s = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._writer.is_busy

    def settle(self, member: Membership) -> str:
        problem = super().settle(member)
        if problem and member.rank == 0:
            warnings.warn(f"a snapshot was not written, and the one before it stays: {problem}")
        if not problem and self._latest is not None:
            self.whole, self.write_s = self._latest, self._writer.last_s
        self._latest = None
        return problem

    def save_folder(self, member: Membership, checkpoint: dict[str, Any], path: Any, **about: Any) -> None:
        self.settle(member)
        super().save_folder(member, checkpoint, path, **about)
        self._latest = Path(path)

    def prepared(self, member: Membership, save: FolderSave) -> FolderSave:
        systems = save.file_systems
        if self._copies is None and len(systems.leaders) > 1:
            self._copies = Copies(self._apart(member).group, partner_of(systems.of_rank, self._clusters))
        here = [path for path in save.target.parent.iterdir() if path.is_dir()]
        if not self._has_room:
            self._check_room(member, save, here)
            self._has_room = True
        # other ranks may have begun to write: their temporary folder is listed, too
        kept = (save.target, atomic.temporary_path(save.target, save.token), self.whole)
        obsolete = [path for path in here if path not in kept]
        save = replace(save, obsolete=obsolete if member.rank in systems.leaders else [])
        return save if self._copies is None else replace(save, copy=self._copies)

    def _check_room(self, member: Membership, save: FolderSave, here: Sequence[Path]) -> None:
        """Raise ConfigurationError if two snapshots do not fit in the host's memory beside what is not of this job. All ranks must call."""
        sizes = member.all_gather(sum(num_bytes(value) for _, value in save.items) + len(save.rest))
        of_rank = save.file_systems.of_rank
        ranks = [rank for rank, system in enumerate(of_rank) if system == of_rank[member.rank]]
        copied = [] if self._copies is None else [sender for rank in ranks for sender in self._copies.senders(rank)]
        needed = int(2 * _ROOM * sum(sizes[rank] for rank in (*ranks, *copied)))
        usage = shutil.disk_usage(save.target.parent)
        held = sum(path.stat().st_size for folder in here for path in folder.iterdir())
        problem = ""
        if needed > usage.free + held:
            problem = (
                f"two snapshots of this host's ranks{', with copies of others,' if copied else ''} take {needed / 1e6:.0f} MB, and "
                f"{save.target.parent.parent} on host {socket.gethostname()} has {usage.free / 1e6:.0f} MB left of {usage.total / 1e6:.0f}: "
                f"make it larger (docker run --shm-size=..., a Kubernetes volume with medium: Memory)"
            )
        problems = [said for said in member.all_gather(problem) if said]
        if problems:
            raise ConfigurationError(problems[0])
