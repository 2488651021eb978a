"""Find and open a checkpoint of either format, on file systems that may not be shared."""

import functools
import socket
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.checkpoint import atomic, run_state
from lightning_holmes.checkpoint.folder import FolderOptimizerState, FolderReader, FolderStateDict
from lightning_holmes.checkpoint.manifest import PLAN, REST, Manifest, ValueEntry
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.torch_file import load_bytes, load_file
from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.errors import CheckpointDamagedError, CheckpointError


def load_folder(
    path: Path,
    member: Membership,
    apart: Callable[[Membership], Membership] = lambda member: member,
    *,
    weights_only: bool,
) -> dict[str, Any]:
    """Return Lightning's checkpoint from a folder; its states are read when they are used. All ranks must call.

    Args:
        apart: returns ``member`` with a gloo group of all ranks; called on all ranks, if one does not see all files.

    Raises:
        CheckpointError: the checkpoint is damaged or torn.
    """
    found, problem = _find(path)
    everyone = member.all_gather((problem, [m.id for _, m in found]))
    ids = [ids[0] for _, ids in everyone if ids]
    if not ids:
        raise CheckpointError(next(p for p, _ in everyone if p))
    # take the first checkpoint of the lowest rank that has one: other ranks may have been killed before they renamed theirs
    folder, manifest = next(((f, m) for f, m in found if m.id == ids[0]), (None, None))
    present = frozenset() if folder is None or manifest is None else manifest.present_files(folder)
    holders = member.all_gather(present)
    provider = next((rank for rank, files in enumerate(holders) if REST in files), None)
    if provider is None:
        raise CheckpointError(f"{path / REST} is missing or cut off, so that the checkpoint {path} is torn")
    rest = (folder / REST).read_bytes() if folder is not None and REST in present else b""
    if not all(REST in files for files in holders):
        sent = (manifest.to_bytes(), rest) if manifest is not None and member.rank == provider else None
        manifest_bytes, rest = member.all_gather(sent)[provider]
        manifest = manifest or Manifest.from_bytes(manifest_bytes, str(path))
    assert manifest is not None  # a rank that has the rest has the manifest
    if zlib.crc32(rest) != manifest.rest_crc32:
        raise CheckpointDamagedError(f"{path / REST} is damaged: its checksum differs from the one in the manifest")
    providers = _providers(path, manifest, holders)
    everywhere = all(files >= set(providers) for files in holders)
    reader = FolderReader(manifest, folder, None if everywhere else functools.partial(_fetch, apart(member), providers))
    checkpoint: dict[str, Any] = load_bytes(rest, str(path / REST), weights_only=weights_only)
    checkpoint["state_dict"] = FolderStateDict(reader)
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        entries = manifest.optimizers[index] if index < len(manifest.optimizers) else {}
        optimizer["state"] = FolderOptimizerState(reader, entries)
    return checkpoint


def read_state_dict(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the whole module's state from a checkpoint of either format, in one process.

    Raises:
        CheckpointError: the checkpoint is damaged or torn.
    """
    if not path.is_dir():
        return dict(load_file(path, weights_only=weights_only)["state_dict"])
    state: FolderStateDict = load_folder(path, Membership(), weights_only=weights_only)["state_dict"]
    return state.read_many(state)


def read_plan(path: Path) -> str | None:
    """Return the YAML of the plan in a checkpoint of either format; "" if it has no plan, None if ``path`` is no checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    if path.is_dir():
        return (path / PLAN).read_text(encoding="utf-8") if (path / PLAN).is_file() else ""
    return run_state.take_plan(dict(load_file(path))) if zipfile.is_zipfile(path) else None


def _find(path: Path) -> tuple[list[tuple[Path, Manifest]], str]:
    """Return the folders on this host that may be the checkpoint, and the reason if there is none. They include a folder that was
    complete but not yet renamed when the process was killed."""
    found, problem = [], f"there is no checkpoint {path} on {socket.gethostname()}"
    for folder in (path, *atomic.temporary_paths(path), atomic.previous_path(path)):
        if folder.is_dir():
            try:
                found.append((folder, Manifest.load(folder)))
            except CheckpointError as error:
                if folder == path:
                    problem = str(error)
    return found, problem


def _providers(path: Path, manifest: Manifest, present: Sequence[frozenset[str]]) -> dict[str, int]:
    """For each file with values the lowest rank that sees it."""
    providers = {}
    for name, entry in manifest.files.items():
        if entry.file_system is None:
            continue
        ranks = [rank for rank, files in enumerate(present) if name in files]
        if not ranks:
            raise CheckpointError(
                f"the checkpoint {path} is torn: {name} is missing or cut off on every host of this job; it was written "
                f"on host {entry.host!r}: copy it from there, or start a rank there"
            )
        providers[name] = ranks[0]
    return providers


def _fetch(
    member: Membership, providers: Mapping[str, int], reader: FolderReader, wanted: Sequence[ValueEntry]
) -> dict[ValueEntry, bytes]:
    """Fetch the bytes of values from ranks that see their files; all ranks must call together.

    Args:
        member: with a gloo group: values are on the host, and WORLD may use NCCL.
        providers: for each file the rank that sends its values.
    """
    rank, group = member.rank, member.group
    requests: list[list[ValueEntry]] = member.all_gather(list(wanted))
    fetched: dict[ValueEntry, bytes] = {}
    for receiver, entries in enumerate(requests):
        for entry in entries:
            sender = providers[entry.file]
            if rank == sender:
                data = torch.frombuffer(bytearray(reader.raw(entry)), dtype=torch.uint8)
                wait_for(dist.isend(data, receiver, group=group), group)
            elif rank == receiver:
                data = torch.empty(entry.length, dtype=torch.uint8)
                wait_for(dist.irecv(data, sender, group=group), group)
                fetched[entry] = data.numpy().tobytes()
    return fetched
