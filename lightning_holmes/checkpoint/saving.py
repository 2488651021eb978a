"""Save one folder: every rank writes its part, the manifest is made of all parts, and the folder appears whole on every file system.

Checkpoints, checkpoints in the background and snapshots are written by this file alone. Steps: parts are written to a temporary folder
beside the target; all ranks gather the places of the values; each file system's leader adds the files that are the same everywhere,
the manifest last; when all are on the disk, rank 0 renames its folder, and then the other leaders rename theirs. If a process is killed
in between, the old checkpoint remains, or, on file systems that had not renamed yet, a whole folder under its temporary name, where
loading finds it.
"""

import os
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.folder import part_file, write_part
from lightning_holmes.checkpoint.manifest import MANIFEST, PLAN, REST, FileEntry, Manifest, ValueEntry
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.parts import Item, Value
from lightning_holmes.errors import CheckpointError
from lightning_holmes.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSave:
    """One rank's contribution to a save.

    Attributes:
        items: this rank's values. They may be collected with other ranks as they are written: each rank goes through all of them.
        rest: the file with everything that belongs to no part; on rank 0.
        order: the names of the whole ``state_dict``.
        num_optimizers: 0 if optimizer states are not saved.
        obsolete: folders that are deleted before the first value is written, to make room.
        copy: called with the folder and this rank's file, once the file is written, or does not exist because writing has failed: exchanges
            copies of files between file systems.
    """

    target: Path
    token: str
    file_systems: FileSystems
    items: Iterable[Item]
    order: Sequence[str]
    num_optimizers: int
    rest: bytes
    plan: str
    obsolete: Sequence[Path] = ()
    copy: Callable[[Path, Path], None] = lambda folder, file: None

    def run(self, member: Membership) -> None:
        """Write the folder; every rank must call.

        Args:
            member: its group is used by no other thread.

        Raises:
            CheckpointError: on every rank, if one rank could not write. The target is then unchanged.
        """
        temporary = atomic.temporary_path(self.target, self.token)
        try:
            self._run(member, temporary)
        except BaseException:
            atomic.delete(temporary)
            raise

    def _run(self, member: Membership, temporary: Path) -> None:
        rank, leaders = member.rank, self.file_systems.leaders
        several, leads = len(leaders) > 1, rank in leaders
        parts = member.all_gather(self._write_part(rank, temporary))
        _raise_first(part["error"] for part in parts)
        rest: bytes = member.broadcast(self.rest) if several else self.rest
        problem = self._problem(rank, lambda: self._add_common_files(temporary, parts, rest)) if leads else ""
        if several:  # nothing is renamed before all are complete
            _raise_first(member.all_gather(problem))
        if rank == 0 and not problem:
            problem = self._problem(rank, lambda: atomic.replace(temporary, self.target))
        _raise_first(member.all_gather(problem))
        if leads:
            if rank != 0:
                atomic.replace(temporary, self.target)
            for left in atomic.temporary_paths(self.target):
                atomic.delete(left)

    def _write_part(self, rank: int, temporary: Path) -> dict[str, Any]:
        """Write this rank's file. Return what all ranks are told of it: the places of its values, or the error."""
        path, items = temporary / part_file(rank), iter(self.items)
        told: dict[str, Any] = {"entries": [], "files": {}}

        def write() -> None:
            for folder in self.obsolete:
                atomic.delete(folder)
            temporary.mkdir(parents=True, exist_ok=True)
            told["entries"] = [(name, asdict(entry)) for name, entry in write_part(path, items).items()]
            told["files"] = {path.name: (path.stat().st_size, socket.gethostname())}

        problem = self._problem(rank, write)
        if problem:
            atomic.delete(path)
            for _ in items:  # other ranks still need this one to collect theirs
                pass
        return told | {"error": problem or self._problem(rank, lambda: self.copy(temporary, path))}

    def _problem(self, rank: int, do: Callable[[], None]) -> str:
        """Call ``do``, and return its error in words; "" if there is none."""
        try:
            do()
        except Exception as error:
            return not_written(rank, self.target, error)
        return ""

    def _add_common_files(self, temporary: Path, parts: Sequence[Mapping[str, Any]], rest: bytes) -> None:
        """Write the files that are the same on every file system, the manifest last."""
        values: dict[Value, ValueEntry] = {}
        files: dict[str, FileEntry] = {}
        for rank, part in enumerate(parts):
            for name, entry in part["entries"]:
                values.setdefault(tuple(name), ValueEntry(**{**entry, "shape": tuple(entry["shape"])}))
            for name, (size, host) in part["files"].items():
                files[name] = FileEntry(num_bytes=size, file_system=self.file_systems.of_rank[rank], host=host)
        saved = {name[1]: entry for name, entry in values.items() if name[0] == "state_dict"}
        ordered = dict.fromkeys([n for n in self.order if n in saved]) | dict.fromkeys(saved)
        optimizers: list[dict[str, dict[str, ValueEntry]]] = [{} for _ in range(self.num_optimizers)]
        for name, entry in values.items():
            if name[0] != "state_dict":
                index = int(name[0].removeprefix("optimizer_"))
                optimizers[index].setdefault(name[2], {})[name[3]] = entry
        common = {REST: rest, PLAN: self.plan.encode()}
        files |= {name: FileEntry(num_bytes=len(data)) for name, data in common.items()}
        manifest = Manifest(
            id=self.token,
            files=files,
            state_dict={n: saved[n] for n in ordered},
            optimizers=optimizers,
            rest_crc32=zlib.crc32(rest),
            versions={"lightning_holmes": __version__, "torch": str(torch.__version__)},
        )
        common[MANIFEST] = manifest.to_bytes()
        for name, data in common.items():
            atomic.write_bytes(temporary / name, data)
        atomic.sync_folder(temporary)


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        if problem:
            raise CheckpointError(problem)


def not_written(rank: int, target: Path, error: BaseException) -> str:
    """The error message of a rank that could not write a checkpoint of either format."""
    left = "the checkpoint before it is still there" if os.path.lexists(target) else "nothing is left of it"
    return (
        f"{target} could not be written by rank {rank} on host {socket.gethostname()}: "
        f"{type(error).__name__}: {error}; {left}"
    )
