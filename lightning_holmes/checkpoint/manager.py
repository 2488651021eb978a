"""CheckpointManager: saves, loads and removes a strategy's checkpoints of either format, and waits for background writes.

manager = CheckpointManager(distributed="auto", background=False)
manager.save(job, checkpoint, "last.ckpt", ...)
checkpoint = manager.load(job, "last.ckpt", weights_only=None)
"""

import copy
import functools
import io
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_holmes.checkpoint import atomic, resume
from lightning_holmes.checkpoint.elsewhere import split
from lightning_holmes.checkpoint.file_systems import FileSystems, find_file_systems
from lightning_holmes.checkpoint.loading import load_folder, load_plain
from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.checkpoint.parts import Deferred, PartWriter, Value, made_whole, named_values, share_of
from lightning_holmes.checkpoint.saving import TOPICS, FolderSave, not_written
from lightning_holmes.checkpoint.staging import Staging, Writer
from lightning_holmes.comm.answer import connect_again
from lightning_holmes.comm.gloo import has_ended
from lightning_holmes.comm.objects import all_gather_values, broadcast_value
from lightning_holmes.comm.value_file import Outlet, save_to
from lightning_holmes.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    ConnectionLostError,
)
from lightning_holmes.optim.joined_steps import JoinedSteps
from lightning_holmes.torch_private import default_store

_TOGETHER = timedelta(seconds=2)  # ranks that end by the same exception arrive within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This rank's position in the job: among all ranks, its replica among the replicas, and its rank in its tensor group."""

    rank: int = 0
    size: int = 1
    replica: int = 0
    num_replicas: int = 1
    timeout: timedelta = timedelta(minutes=30)
    tensor_rank: int = 0
    tensor_size: int = 1
    host_group: Any = None
    """The gloo group of all ranks; None: WORLD."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on all ranks; all ranks must call."""
        if self.size == 1:
            return [value]
        return all_gather_values(value)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks; all ranks must call."""
        if self.size == 1:
            return value
        return broadcast_value(value)


class CheckpointManager:
    """Saves and loads the checkpoints of a strategy.

    Args:
        distributed: write folders rather than files; "auto": if there is more than one process.
        background: write in a thread while training continues.
    """

    def __init__(self, *, distributed: bool | Literal["auto"], background: bool) -> None:
        self.distributed = distributed
        self.background = background
        self._writer = Writer()
        self._staging = Staging()
        self._file_systems: dict[str, FileSystems] = {}
        self._last: Meeting | None = None
        self.reading: JoinedSteps | None = None
        """The collective steps that bring values of the next folder to this rank while it is written; all ranks finish them."""
        self.others_may_write = False
        """Whether optimizer nodes may write some of the next folder's values; the same on all ranks."""
        self._writers: dict[Path, tuple[dict[int, PartWriter], list[PartWriter]]] = {}
        """For each folder the writers of deferred values by id, and the list of those that see the folder."""
        self._told: set[Path] = set()

    def writes_folders(self, job: Job, checkpoint_io: Any) -> bool:
        """Whether checkpoints are written as folders; a user's CheckpointIO plugin gets files, as it expects."""
        if self.distributed == "auto":
            return job.size > 1 and type(checkpoint_io) is TorchCheckpointIO
        return bool(self.distributed)

    # saving

    def save_folder(
        self,
        job: Job,
        checkpoint: dict[str, Any],
        path: Any,
        *,
        order: Sequence[str],
        parameters: frozenset[str],
        plan: str,
        assigned: frozenset[str],
        background: bool,
    ) -> None:
        """Write ``checkpoint``, whose states are this rank's parts, as a folder; all ranks must call.

        Args:
            order: the names of the whole ``state_dict``.
            parameters: those of these names that are parameters.
            plan: the plan as YAML.
            assigned: which values each exist on one replica only: "optimizer", the optimizers' states; "state_dict", the parameters.
        """
        self._writer.wait()
        # all-gather rather than broadcast: afterwards every rank's writer has ended and has read the announcements to be deleted
        name, token = job.all_gather((os.fspath(path), uuid.uuid4().hex[:8]))[0]
        if self._last is not None:
            self._last.forget(TOPICS)
        target = _local(name)
        systems = self._systems(job, target.parent, job.all_gather)
        save = self.folder_save(job, checkpoint, target, token, systems, order, parameters, plan, assigned)
        if self.others_may_write:
            save = self.leave_to_others(job, save)
        if background:
            save = replace(save, values=self._staging.copy(save.values))
        if self.reading is not None:
            save, self.reading = replace(save, finish=self.reading.finish), None
        meeting = self._last = Meeting(
            _client(job, job.timeout),
            job.rank,
            job.size,
            token,
            job.timeout,
            functools.partial(has_ended, job.host_group),
        )
        self._writer.run(functools.partial(save.run, meeting), background=background)

    def leave_to_others(self, job: Job, save: FolderSave) -> FolderSave:
        """Let the writers of deferred values that see the folder write these values; return the save of the rest. All ranks must call."""
        save.prepare()
        folder, values = save.target.parent, save.values
        wanted = {id(v.writer): v.writer for v in values.values() if isinstance(v, Deferred) and v.writer is not None}
        known = self._writers.get(folder)
        if known is None or known[0].keys() != wanted.keys():
            known = self._writers[folder] = wanted, [writer for writer in wanted.values() if writer.sees(folder)]
        seen = known[1]
        # after this all-gather no rank is still in prepare()
        told = job.all_gather(([w.name for w in wanted.values()], [w.name for w in seen]))
        if job.rank == 0 and folder not in self._told and any(names for names, _ in told):
            self._told.add(folder)
            print(_who_writes(folder, told), flush=True)
        temporary = atomic.temporary_path(save.target, save.token)
        temporary.mkdir(parents=True, exist_ok=True)
        own, parts = split(values, seen, temporary, job.rank)
        return replace(save, values=own, elsewhere=parts, prepare=lambda: None)

    def save_in_distress(
        self,
        job: Job,
        checkpoint: dict[str, Any],
        path: Any,
        *,
        order: Sequence[str],
        parameters: frozenset[str],
        plan: str,
        assigned: frozenset[str],
    ) -> None:
        """Write a folder while an exception ends the run, if all ranks call this at the same step within _TOGETHER.

        Raises:
            CheckpointError: they do not, or the ranks form tensor groups.
        """
        self.finish(failed=True, alone=job.size == 1)
        if job.tensor_size > 1:
            raise CheckpointError(
                f"tensor_parallel_size={job.tensor_size}: after a failure the ranks of a tensor group cannot be asked for their parts"
            )
        target = _local(os.fspath(path))
        token = f"failure-{checkpoint['global_step']}"
        meeting = Meeting(_client(job, _TOGETHER), job.rank, job.size, f"{token}-{target}", _TOGETHER)
        systems = self._systems(job, target.parent, meeting.all_gather)  # the process groups may not work any more
        self.folder_save(job, checkpoint, target, token, systems, order, parameters, plan, assigned).run(meeting)

    def folder_save(
        self,
        job: Job,
        checkpoint: dict[str, Any],
        target: Path,
        token: str,
        systems: FileSystems,
        order: Sequence[str],
        parameters: frozenset[str],
        plan: str,
        assigned: frozenset[str],
    ) -> FolderSave:
        rest = dict(checkpoint)
        state_dict, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
        values = named_values(state_dict, optimizers or [])
        if optimizers is not None:
            rest["optimizer_states"] = [{"param_groups": o.get("param_groups", [])} for o in optimizers]
        buffer = io.BytesIO()
        if job.rank == 0:
            torch.save(rest, buffer)
        return FolderSave(
            target=target,
            token=token,
            file_systems=systems,
            values=_share(job, values, parameters, assigned),
            order=order,
            num_optimizers=len(optimizers or []),
            rest=buffer.getvalue(),
            plan=plan,
        )

    def save_plain(self, job: Job, checkpoint: dict[str, Any], path: Any, *, background: bool) -> None:
        """Write ``checkpoint``, which rank 0 has whole, as one file that plain Lightning reads. All ranks must call.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write this checkpoint, or an earlier one in the background.
        """
        target = _local(os.fspath(path))
        if background and job.rank == 0:
            checkpoint = copy.deepcopy(checkpoint)

        def write() -> None:
            try:
                with atomic.writing(target) as temporary, temporary.open("wb") as file:
                    save_to(Outlet(file), checkpoint)
            except OSError as error:
                raise CheckpointError(not_written(job.rank, target, error)) from None

        problem = ""
        if job.rank == 0:
            try:
                self._writer.run(write, background=background)
            except CheckpointError as error:
                problem = str(error)
        problem = job.broadcast(problem)
        if problem:
            raise CheckpointError(problem)

    def remove(self, job: Job, path: Any) -> None:
        """Remove a checkpoint of either format once the checkpoint that is being written is complete. All ranks must call."""
        target = _local(os.fspath(path))
        folder = str(target.parent)
        if folder in self._file_systems:
            leads = self._file_systems[folder].is_leader(job.rank)
        else:
            leads = job.rank == 0
        if leads:
            self._writer.afterwards(functools.partial(atomic.remove, target))

    def finish(
        self,
        *,
        failed: bool = False,
        alone: bool = False,
        all_gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        """Wait for the current write; after a failure of the run only for _TOGETHER, unless this process is ``alone``.

        Args:
            all_gather: gathers a value of each rank; if checkpoints are written in the background and the run has not failed, all
                ranks call it.

        Raises:
            CheckpointError: the write has failed on any rank, and the run has not failed.
        """
        if not failed:
            error: Exception | None = None
            try:
                self._writer.wait()
            except Exception as own:
                error = own
            problems = all_gather(None if error is None else str(error)) if self.background else []
            others = [problem for problem in problems if problem is not None]  # a single file is written by rank 0 only
            if error is None and others:
                error = CheckpointError(others[0])
            if error is not None:
                raise error
            return
        try:
            self._writer.wait(timeout_s=None if alone else _TOGETHER.total_seconds())
        except Exception as error:
            warnings.warn(f"a checkpoint was not written: {error}")

    def add_what_resuming_needs(self, job: Job, checkpoint: dict[str, Any], *, failed: bool, **about: int) -> None:
        """Add the run's seed and each replica's loader states to ``checkpoint``; all ranks must call."""
        states = resume.loader_states(checkpoint)
        replicas = [states]
        if states and job.num_replicas > 1:
            if failed:  # the other ranks may not answer; resuming inside an epoch will be refused
                replicas = []
            else:
                everyone = dict(reversed(job.all_gather((job.replica, states))))
                replicas = [everyone[replica] for replica in range(job.num_replicas)]
        elif not states:
            replicas = [[] for _ in range(job.num_replicas)]
        resume.add(checkpoint, replicas=replicas, **about)

    def _systems(self, job: Job, folder: Path, all_gather: Callable[[Any], list[Any]]) -> FileSystems:
        if str(folder) not in self._file_systems:
            self._file_systems[str(folder)] = find_file_systems(folder, job.rank, job.size, all_gather)
        return self._file_systems[str(folder)]

    # loading

    def load(self, job: Job, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Return Lightning's checkpoint of either format; its states are read when they are used. All ranks must call.

        Raises:
            CheckpointError: the checkpoint is damaged or torn.
            CheckpointNotFoundError: there is no checkpoint at ``path``.
        """
        self._writer.wait()
        name = job.broadcast(os.fspath(path))
        path = _local(name)
        if path.is_symlink():
            path = path.parent / os.readlink(path)
        path = Path(job.broadcast(str(path)))
        restricted = weights_only is not False
        kinds = job.all_gather("folder" if _holds_folder(path) else "file" if path.is_file() else "")
        if "folder" in kinds:
            return load_folder(path, job.rank, job.all_gather, weights_only=restricted)
        if "" in kinds:
            if not any(kinds):
                raise CheckpointNotFoundError(f"ckpt_path={str(path)!r}: there is no such checkpoint, file or folder")
            raise CheckpointError(
                f"the checkpoint {path} is one file, which ranks {[r for r, k in enumerate(kinds) if k]} see and ranks "
                f"{[r for r, k in enumerate(kinds) if not k]} do not: copy it to their hosts"
            )
        return load_plain(path, weights_only=restricted, check=job.rank == 0, agree=job.broadcast)


def _share(
    job: Job, values: Mapping[Value, Any], parameters: frozenset[str], assigned: frozenset[str]
) -> dict[Value, Any]:
    """The values that this rank writes. The ranks of a tensor group split their replica's share among them; all of them must call."""

    def is_alone(name: Value) -> bool:
        of_module = name[0] == "state_dict"
        return ("state_dict" in assigned and name[1] in parameters) if of_module else "optimizer" in assigned

    alone = {name: value for name, value in values.items() if is_alone(name)}
    alike = {name: value for name, value in values.items() if name not in alone}
    ours = share_of(alike, parameters, job.replica, job.num_replicas) | alone
    if job.tensor_size == 1:
        return made_whole(ours, ours)
    return made_whole(ours, share_of(ours, parameters, job.tensor_rank, job.tensor_size))


def _who_writes(folder: Path, told: Sequence[tuple[Sequence[str], Sequence[str]]]) -> str:
    """The message that says which writers write; ``told`` has for each rank the names of its writers, and of those that see the folder."""
    all_names, names = (sorted({name for of_rank in told for name in of_rank[place]}) for place in (0, 1))
    if not names:
        return f"{folder}: {', '.join(all_names)} cannot write there, so that workers write all parts of checkpoints"
    some = " where they see the file system of the worker" if any(len(a) > len(b) for a, b in told) else ""
    return f"{folder}: {', '.join(names)} {'writes its' if len(names) == 1 else 'write their'} own part of checkpoints{some}"


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


def _holds_folder(path: Path) -> bool:
    return path.is_dir() or (not path.exists() and any(p.is_dir() for p in atomic.temporary_paths(path)))


def _client(job: Job, timeout: timedelta) -> Any:
    """A new client of the job's store, for use in another thread; None in a job of one process. Raises CheckpointError."""
    if job.size == 1:
        return None
    try:
        return connect_again(default_store(), timeout_s=timeout.total_seconds())
    except ConnectionLostError as error:
        raise CheckpointError(f"ranks cannot agree about a checkpoint: {error}") from None
