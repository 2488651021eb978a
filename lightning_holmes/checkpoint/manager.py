"""CheckpointManager: saves, loads and removes a strategy's checkpoints of either format, and waits for background writes.

manager = CheckpointManager(distributed="auto", background=False)
manager.save_folder(member, checkpoint, "last.ckpt", ...)
checkpoint = manager.load(member, "last.ckpt", weights_only=None)
"""

import copy
import functools
import io
import itertools
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.file_systems import FileSystems, find_file_systems
from lightning_holmes.checkpoint.loading import load_folder
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.parts import Item, Value, items_of, made_whole, named_values, share_of
from lightning_holmes.checkpoint.saving import FolderSave, not_written
from lightning_holmes.checkpoint.staging import Staging, Writer
from lightning_holmes.checkpoint.torch_file import damaged_records, load_file, save_file
from lightning_holmes.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_holmes.lightning_package import fabric
from lightning_holmes.pipeline import tree

_PATIENCE_S = 2.0
"""How long a rank whose run has failed waits for a write in the background, for which other ranks may be gone."""


class CheckpointManager:
    """Saves and loads the checkpoints of a strategy.

    Args:
        distributed: write folders rather than files; "auto": if there is more than one process.
        background: write in a thread while training continues.
    """

    group_name = "holmes_checkpoints"

    def __init__(self, *, distributed: bool | Literal["auto"], background: bool) -> None:
        self.distributed = distributed
        self.background = background
        self._writer = Writer()
        self._staging = Staging()
        self._file_systems: dict[str, FileSystems] = {}
        self._group: Any = None
        self.collected: Iterable[Item] = ()
        """Values of the next folder that this rank collects with other ranks as it writes them, and that its checkpoint therefore lacks. All ranks go
        through theirs."""

    def writes_folders(self, member: Membership, checkpoint_io: Any) -> bool:
        """Whether checkpoints are written as folders; a user's CheckpointIO plugin gets files, as it expects."""
        if self.distributed == "auto":
            return member.size > 1 and type(checkpoint_io) is fabric.plugins.TorchCheckpointIO
        return bool(self.distributed)

    # saving

    def save_folder(
        self,
        member: Membership,
        checkpoint: dict[str, Any],
        path: Any,
        *,
        order: Sequence[str],
        parameters: frozenset[str],
        plan: str,
        assigned: frozenset[str],
        background: bool,
    ) -> None:
        """Write ``checkpoint``, whose states are this rank's parts, and :attr:`collected`, as a folder; all ranks must call.

        Args:
            order: the names of the whole ``state_dict``.
            parameters: those of these names that are parameters.
            plan: the plan as YAML.
            assigned: which values each exist on one replica only: "optimizer", the optimizers' states; "state_dict", the parameters.
        """
        collected, self.collected = self.collected, ()
        self._writer.wait()
        # all-gather rather than broadcast: afterwards every rank's writer has ended, and removes nothing any more
        name, token = member.all_gather((os.fspath(path), uuid.uuid4().hex[:8]))[0]
        target = _local(name)
        rest = dict(checkpoint)
        state_dict, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
        if optimizers is not None:
            rest["optimizer_states"] = [{"param_groups": o.get("param_groups", [])} for o in optimizers]
        shared = _share(member, named_values(state_dict, optimizers or []), parameters, assigned)
        items: Iterable[Item] = itertools.chain(items_of(shared), collected)
        folder = str(target.parent)
        if folder not in self._file_systems:
            self._file_systems[folder] = find_file_systems(target.parent, member)
        save = FolderSave(
            target=target,
            token=token,
            file_systems=self._file_systems[folder],
            items=self._staging.copy(items) if background else items,
            order=order,
            num_optimizers=len(optimizers or []),
            rest=bytes_of(rest) if member.rank == 0 else b"",
            plan=plan,
        )
        write = functools.partial(self.prepared(member, save).run, self._apart(member))
        self._writer.run(write, background=background)

    def prepared(self, member: Membership, save: FolderSave) -> FolderSave:
        """Return ``save`` as it is to be run; all ranks call it together."""
        return save

    def _apart(self, member: Membership) -> Membership:
        """``member`` with a group that this manager alone uses, in whatever thread. All ranks must call."""
        if self._group is None and member.size > 1:
            self._group = member.make_group(self.group_name)
        return replace(member, group=self._group)

    def save_plain(self, member: Membership, checkpoint: dict[str, Any], path: Any, *, background: bool) -> None:
        """Write ``checkpoint``, which rank 0 has whole, as one file that plain Lightning reads. All ranks must call.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write this checkpoint, or an earlier one in the background.
        """
        target = _local(os.fspath(path))
        if background and member.rank == 0:
            checkpoint = copy.deepcopy(checkpoint)

        def write() -> None:
            try:
                with atomic.writing(target) as temporary:
                    save_file(temporary, checkpoint)
            except OSError as error:
                raise CheckpointError(not_written(member.rank, target, error)) from None

        problem = ""
        if member.rank == 0:
            try:
                self._writer.run(write, background=background)
            except CheckpointError as error:
                problem = str(error)
        problem = member.broadcast(problem)
        if problem:
            raise CheckpointError(problem)

    def remove(self, member: Membership, path: Any) -> None:
        """Remove a checkpoint of either format once the checkpoint that is being written is complete. All ranks must call."""
        target = _local(os.fspath(path))
        systems = self._file_systems.get(str(target.parent), FileSystems(of_rank=(0,)))
        if member.rank in systems.leaders:
            self._writer.afterwards(functools.partial(atomic.remove, target))

    def finish(self, member: Membership, *, failed: bool = False) -> None:
        """Wait for the current write. After a failure of the run, for which other ranks may be gone, wait for some seconds only. Otherwise, if checkpoints
        are written in the background, all ranks must call.

        Raises:
            CheckpointError: the write has failed on any rank, and the run has not failed.
        """
        if failed:
            try:
                self._writer.wait(timeout_s=None if member.size == 1 else _PATIENCE_S)
            except Exception as error:
                warnings.warn(f"a checkpoint was not written: {error}")
            return
        problem = self.settle(member) if self.background else ""
        if problem:
            raise CheckpointError(problem)

    def settle(self, member: Membership) -> str:
        """Wait for the current write; all ranks must call. Return on all of them the first one's error; "": none has one."""
        problem = ""
        try:
            self._writer.wait()
        except Exception as error:
            problem = str(error)
        return next(filter(None, member.all_gather(problem)), "")

    # loading

    def load(self, member: Membership, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Return Lightning's checkpoint of either format; its states are read when they are used. All ranks must call.

        Raises:
            CheckpointError: the checkpoint is damaged or torn.
            CheckpointNotFoundError: there is no checkpoint at ``path``.
        """
        self._writer.wait()
        name = member.broadcast(os.fspath(path))
        path = _local(name)
        if path.is_symlink():
            path = path.parent / os.readlink(path)
        path = Path(member.broadcast(str(path)))
        restricted = weights_only is not False
        is_folder = path.is_dir() or (not path.exists() and any(p.is_dir() for p in atomic.temporary_paths(path)))
        kinds = member.all_gather("folder" if is_folder else "file" if path.is_file() else "")
        if "folder" in kinds:
            return load_folder(path, member, self._apart, weights_only=restricted)
        if "" in kinds:
            if not any(kinds):
                raise CheckpointNotFoundError(f"ckpt_path={str(path)!r}: there is no such checkpoint, file or folder")
            raise CheckpointError(
                f"the checkpoint {path} is one file, which ranks {[r for r, k in enumerate(kinds) if k]} see and ranks "
                f"{[r for r, k in enumerate(kinds) if not k]} do not: copy it to their hosts"
            )
        # one rank reads the whole file once and compares its checksums; tensors of the states are read when they are used
        damaged = member.broadcast(damaged_records(path) if member.rank == 0 else [])
        checkpoint = load_file(path, weights_only=restricted, damaged=damaged)
        mapped = {"state_dict", "optimizer_states"}
        return {k: v if k in mapped else tree.map_tensors(Tensor.clone, v) for k, v in checkpoint.items()}


def _share(
    member: Membership, values: Mapping[Value, Any], parameters: frozenset[str], assigned: frozenset[str]
) -> dict[Value, Any]:
    """The values that this rank writes. The ranks of a tensor group split their replica's share among them; all of them must call."""

    def is_alone(name: Value) -> bool:
        of_module = name[0] == "state_dict"
        return ("state_dict" in assigned and name[1] in parameters) if of_module else "optimizer" in assigned

    alone = {name: value for name, value in values.items() if is_alone(name)}
    alike = {name: value for name, value in values.items() if name not in alone}
    ours = share_of(alike, parameters, member.replica, member.num_replicas) | alone
    return made_whole(ours, share_of(ours, parameters, member.tensor_rank, member.tensor_size))


def bytes_of(value: Any) -> bytes:
    """``value`` as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def is_local(path: Any) -> bool:
    """Whether a path is a file system path or a file:// URL, and no other URL."""
    return "://" not in os.fspath(path) or os.fspath(path).startswith("file://")


def _local(path: str) -> Path:
    if not is_local(path):
        raise ConfigurationError(
            f"{path}: a checkpoint folder needs a path that is mounted; use save_distributed_checkpoint=False for URLs"
        )
    if "\0" in path:
        raise ConfigurationError(f"{path!r}: no file has a zero character in its path")
    return Path(path.removeprefix("file://"))
