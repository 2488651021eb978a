"""Find and open a checkpoint of either format, on file systems that may not be shared."""

import socket
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.checkpoint import atomic, resume
from lightning_holmes.checkpoint.folder import FolderOptimizerState, FolderReader, FolderStateDict
from lightning_holmes.checkpoint.manifest import PLAN, REST, Manifest, ValueEntry
from lightning_holmes.checkpoint.restricted import damaged_records, load_bytes, load_file
from lightning_holmes.errors import CheckpointDamagedError, CheckpointError
from lightning_holmes.pipeline import tree


def load_folder(path: Path, rank: int, all_gather: Callable[[Any], list[Any]], *, weights_only: bool) -> dict[str, Any]:
    """Return Lightning's checkpoint from a folder; its states are read when they are used. All ranks must call."""
    found, problem = _find(path)
    everyone = all_gather((problem, [(m.id, f is not None) for f, m in found], socket.gethostname()))
    ids = [ids[0][0] for _, ids, _ in everyone if ids]
    if not ids:
        raise CheckpointError(next(p for p, _, _ in everyone if p))
    # take the first checkpoint of the lowest rank that has one: other ranks may have been killed before they renamed theirs
    mine = next(((folder, m) for folder, m in found if m.id == ids[0]), None)
    rest = b""
    if mine is not None:
        folder, manifest = mine
        rest = (folder / REST).read_bytes() if REST in manifest.present_files(folder) else b""
    holders = all_gather((mine is not None and bool(rest), mine[1].present_files(mine[0]) if mine else frozenset()))
    provider = next((r for r, (has, _) in enumerate(holders) if has), None)
    if provider is None:
        raise CheckpointError(f"{path / REST} is missing or cut off, so that the checkpoint {path} is torn")
    if not all(has for has, _ in holders):
        manifest_bytes, rest = all_gather((mine[1].to_bytes(), rest) if rank == provider and mine else None)[provider]
        if mine is None:
            mine_folder, manifest = None, Manifest.from_bytes(manifest_bytes, str(path))
        else:
            mine_folder, manifest = mine
    else:
        assert mine is not None
        mine_folder, manifest = mine
    if zlib.crc32(rest) != manifest.rest_crc32:
        raise CheckpointDamagedError(f"{path / REST} is damaged: its checksum differs from the one in the manifest")
    providers = _providers(path, manifest, [present for _, present in holders])
    everywhere = all(present >= set(providers) for _, present in holders)
    reader = FolderReader(manifest, mine_folder, None if everywhere else NetworkFetch(rank, providers, all_gather))
    checkpoint: dict[str, Any] = load_bytes(rest, str(path / REST), weights_only=weights_only)
    checkpoint["state_dict"] = FolderStateDict(reader)
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        optimizer["state"] = FolderOptimizerState(reader, index)
    return checkpoint


def read_state_dict(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the whole module's state from a checkpoint of either format, in one process.

    Raises:
        CheckpointError: the checkpoint is damaged or torn.
    """
    if not path.is_dir():
        return dict(load_file(path, weights_only=weights_only)["state_dict"])
    state = load_folder(path, 0, lambda value: [value], weights_only=weights_only)["state_dict"]
    assert isinstance(state, FolderStateDict)
    return state.read_many(state)


def read_plan(path: Path) -> str | None:
    """Return the YAML of the plan in a checkpoint of either format; "" if it has no plan, None if ``path`` is no checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    if path.is_dir():
        return (path / PLAN).read_text(encoding="utf-8") if (path / PLAN).is_file() else ""
    return resume.take_plan(dict(load_file(path))) if zipfile.is_zipfile(path) else None


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


class NetworkFetch:
    """Fetches the bytes of values from ranks that see their files; all ranks must call it together."""

    def __init__(self, rank: int, providers: dict[str, int], all_gather: Callable[[Any], list[Any]]) -> None:
        self._rank = rank
        self._providers = providers
        self._all_gather = all_gather

    def __call__(self, reader: FolderReader, wanted: Sequence[ValueEntry]) -> dict[ValueEntry, bytes]:
        requests: list[list[ValueEntry]] = self._all_gather(list(wanted))
        group = dist.new_group(backend="gloo")  # values are on the host, and WORLD may use NCCL
        fetched: dict[ValueEntry, bytes] = {}
        try:
            for receiver, entries in enumerate(requests):
                for entry in entries:
                    sender = self._providers[entry.file]
                    if self._rank == sender:
                        data = torch.frombuffer(bytearray(reader.raw(entry)), dtype=torch.uint8)
                        dist.send(data, receiver, group=group)
                    elif self._rank == receiver:
                        data = torch.empty(entry.length, dtype=torch.uint8)
                        dist.recv(data, sender, group=group)
                        fetched[entry] = data.numpy().tobytes()
            # a rank without anything to send would close connections that others are still making
            self._all_gather(None)
        finally:
            dist.destroy_process_group(group)
        return fetched


def load_plain(path: Path, *, weights_only: bool, check: bool, agree: Callable[[Any], Any]) -> dict[str, Any]:
    """Return Lightning's checkpoint from one file; the states' tensors are read when they are used. All ranks must call.

    Args:
        check: read the whole file once and compare its checksums; true on one rank.
        agree: broadcasts that rank's result to all ranks.
    """
    damaged = agree(damaged_records(path) if check else [])
    if damaged:
        raise CheckpointError(f"{path} is damaged: the checksum of {', '.join(damaged[:3])} is wrong")
    checkpoint: dict[str, Any] = load_file(path, weights_only=weights_only)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of Lightning's: it has no state_dict")
    mapped = {"state_dict", "optimizer_states"}
    return {k: v if k in mapped else tree.map_tensors(Tensor.clone, v) for k, v in checkpoint.items()}
