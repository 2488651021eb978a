"""Save one folder: every rank writes its part, rank 0 makes the manifest, and the folder appears whole on every file system.

Steps: parts are written to a temporary folder beside the target; rank 0 gathers the places of the values; each file system's
leader adds the files that are the same everywhere, the manifest last; when all are on the disk, rank 0 renames its folder, and
then the other leaders rename theirs. If a process is killed in between, the old checkpoint remains, or, on file systems that
had not renamed yet, a whole folder under its temporary name, where loading finds it.
"""

import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.elsewhere import ElsewherePart
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.folder import dcp_metadata, part_file, write_part
from lightning_holmes.checkpoint.manifest import MANIFEST, METADATA, PLAN, REST, FileEntry, Manifest, ValueEntry
from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.checkpoint.parts import Value
from lightning_holmes.comm.wire import decode, encode
from lightning_holmes.errors import CheckpointError
from lightning_holmes.version import __version__

TOPICS = ("files", "commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSave:
    """One rank's contribution to a save.

    ``rest`` is the file with everything that belongs to no part, ``order`` the names of the whole ``state_dict``; both are used
    only on rank 0. ``num_optimizers`` is 0 if optimizer states are not saved. ``elsewhere`` are files that other processes write for
    this rank, on its file system. ``prepare`` is called first. ``finish`` is called when this rank has read its values: other ranks
    may still need it to read theirs. ``copy`` is called with the folder and this rank's file once the file is written, or has failed
    and does not exist: it exchanges copies of files between file systems.
    """

    target: Path
    token: str
    file_systems: FileSystems
    values: Mapping[Value, Any]
    order: Sequence[str]
    num_optimizers: int
    rest: bytes
    plan: str
    elsewhere: Sequence[ElsewherePart] = ()
    finish: Callable[[], None] = lambda: None
    prepare: Callable[[], None] = lambda: None
    copy: Callable[[Path, Path], None] = lambda folder, file: None

    def run(self, meeting: Meeting) -> None:
        """Write the folder; every rank must call.

        Raises:
            CheckpointError: on every rank, if one rank could not write. The target is then unchanged.
        """
        temporary = atomic.temporary_path(self.target, self.token)
        try:
            self._run(meeting, temporary)
        except BaseException:
            atomic.delete(temporary)
            raise

    def _run(self, meeting: Meeting, temporary: Path) -> None:
        systems, rank = self.file_systems, meeting.rank
        message: dict[str, Any]
        path = temporary / part_file(rank)
        try:
            self.prepare()
            temporary.mkdir(parents=True, exist_ok=True)
            entries = write_part(path, self.values)
            files = {path.name: (path.stat().st_size, socket.gethostname())}
            for part in self.elsewhere:
                found, size, host = part.wait()
                entries |= found
                files[part.file] = size, host
            message = {"entries": [[name, asdict(entry)] for name, entry in entries.items()], "files": files}
        except Exception as error:
            atomic.delete(path)
            message = {"error": not_written(meeting.rank, self.target, error)}
        self.finish()
        try:
            self.copy(temporary, path)
        except Exception as error:
            message = {"error": message.get("error") or not_written(meeting.rank, self.target, error)}
        gathered = [json.loads(m) for m in meeting.gather("parts", json.dumps(message).encode())]
        announcement: dict[str, Any] = {"error": next((m["error"] for m in gathered if "error" in m), "")}
        if rank == 0 and not announcement["error"]:
            common = self._common_files(gathered)
            announcement["files"] = common if len(systems.leaders) > 1 else {}
        else:
            common = {}
        announcement = decode(meeting.announce("files", encode(announcement)))
        if announcement["error"]:
            raise CheckpointError(announcement["error"])
        problem = ""
        if systems.is_leader(rank):
            try:
                for name, data in (common or announcement["files"]).items():
                    atomic.write_bytes(temporary / name, data)
                atomic.sync_folder(temporary)
            except Exception as error:
                problem = not_written(meeting.rank, self.target, error)
        problems = [p.decode() for p in meeting.gather("ready", problem.encode())] if len(systems.leaders) > 1 else []
        if rank == 0:
            problem = next((p for p in problems if p), problem)
            if not problem:
                try:
                    atomic.replace(temporary, self.target)
                except Exception as error:
                    problem = not_written(meeting.rank, self.target, error)
        problem = meeting.announce("commit", problem.encode()).decode()
        if problem:
            raise CheckpointError(problem)
        if systems.is_leader(rank):
            if rank != 0:
                atomic.replace(temporary, self.target)
            for left in atomic.temporary_paths(self.target):
                atomic.delete(left)

    def _common_files(self, gathered: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """The files that are the same on every file system, in the order in which they are written."""
        values: dict[Value, ValueEntry] = {}
        files: dict[str, FileEntry] = {}
        for rank, message in enumerate(gathered):
            for name, entry in message["entries"]:
                values.setdefault(tuple(name), ValueEntry(**{**entry, "shape": tuple(entry["shape"])}))
            for name, (size, host) in message["files"].items():
                files[name] = FileEntry(num_bytes=size, file_system=self.file_systems.of_rank[rank], host=host)
        saved = {name[1]: entry for name, entry in values.items() if name[0] == "state_dict"}
        names = [n for n in self.order if n in saved] + [n for n in saved if n not in set(self.order)]
        optimizers: list[dict[str, dict[str, ValueEntry]]] = [{} for _ in range(self.num_optimizers)]
        for name, entry in values.items():
            if name[0] != "state_dict":
                index = int(name[0].removeprefix("optimizer_"))
                optimizers[index].setdefault(name[2], {})[name[3]] = entry
        common = {REST: self.rest, PLAN: self.plan.encode()}
        manifest = Manifest(
            id=self.token,
            files=files,
            state_dict={n: saved[n] for n in names},
            optimizers=optimizers,
            rest_crc32=zlib.crc32(self.rest),
            versions={"lightning_holmes": __version__, "torch": str(torch.__version__)},
        )
        common[METADATA] = dcp_metadata(manifest)
        files |= {name: FileEntry(num_bytes=len(data)) for name, data in common.items()}
        common[MANIFEST] = replace(manifest, files=files).to_bytes()
        return common


def not_written(rank: int, target: Path, error: BaseException) -> str:
    """The error message of a rank that could not write a checkpoint of either format."""
    left = "the checkpoint before it is still there" if os.path.lexists(target) else "nothing is left of it"
    return (
        f"{target} could not be written by rank {rank} on host {socket.gethostname()}: "
        f"{type(error).__name__}: {error}; {left}"
    )
