"""Snapshots: checkpoint folders in the memory of the hosts, from which a job that is started again resumes.

    folder = SnapshotFolder(Path("/dev/shm"), name, 0)   # one per fit; each rank makes the object
    manager = SnapshotManager(folder, ...)               # saves like CheckpointManager, into folder.path / "<step>"
    found = find_newest(folder.path, all_gather)         # (path, step) of the newest whole snapshot, or None

Every host has its ranks' files, and copies of other ranks' files (copies.py). The newest two snapshots are kept: the older one until the
newer is whole everywhere. A snapshot has the same content as a checkpoint.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.copies import Copies, partner_of
from lightning_holmes.checkpoint.ending import note_exits, why_not_well
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.history import Event, History
from lightning_holmes.checkpoint.manager import CheckpointManager, Job
from lightning_holmes.checkpoint.manifest import REST, Manifest
from lightning_holmes.checkpoint.parts import num_bytes, same_memory
from lightning_holmes.checkpoint.saving import FolderSave
from lightning_holmes.errors import CheckpointError, ConfigurationError

MEMORY = Path("/dev/shm")
_PREFIX = "lightning_holmes"
_MUTEX, _LOCK, _ATTEMPT, _BEGAN, _PROGRESS, _WHOLE = "mutex", "lock", "attempt", "began", "step", "whole"
_SAVED, _HISTORY, _PROCESS = "checkpoints", "history", "process"
_START = uuid.uuid4().hex  # with the process id it identifies a process, even if containers share the memory
_DIGITS = 20
_READ = {".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"}
"""Suffixes of files that a command may name and that a run does not write."""
_ENDED_S = 3600.0  # a job without a living process is not expected to be started again after this time
_ENDING_S = 45.0  # processes that a launcher terminates are gone within this time
_PAUSE_S = 0.1
_ROOM = 1.05  # factor on the bytes written, for headers and the manifest
_COMMIT = "+"

Commit = tuple[str, int]
"""A run's name and the version of its values, which optimizer nodes keep when workers are lost."""


def job_name(variables: Mapping[str, str], address: str, port: int) -> str:
    """Return the name of a job's folders: the same when the job is started again, and different for any other job.

    It is derived from the launcher's name of the job, or else the address of rank 0; the user; the script's path; the command; and the
    contents of the script and of the configuration files that the command names."""
    run_id = variables.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        job = f"torchrun {run_id}"
    elif "SLURM_JOB_ID" in variables:
        job = f"slurm {variables['SLURM_JOB_ID']}"
    else:
        job = f"{address}:{port}"
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    digest = hashlib.sha256("\0".join([job, str(os.geteuid()), os.path.abspath(script), *sys.argv]).encode())
    for argument in sys.argv:
        path = Path(argument.partition("=")[2] if argument.startswith("--") else argument)
        if path.suffix in _READ:
            with contextlib.suppress(OSError):
                digest.update(path.read_bytes())
    return f"{_PREFIX}-{os.geteuid()}-{digest.hexdigest()[:16]}"


class SnapshotFolder:
    """The folder of a fit's snapshots on this rank's host, readable by its user alone.

    A living process of the job holds a lock in the folder. Folders of jobs that ended long ago are removed.

    Args:
        base: the folder of the host's memory, or the one that the user has named.
        name: the name of the job.
        fit: the number of fits that the process has begun before.
        start: the name of this start of the job, the same on all its ranks.

    Attributes:
        path: the folder.
        began: when the first attempt at this fit began on this host, in seconds since the epoch; None: this is the first.
        reached: the number of steps that earlier attempts have done.
        newest: the step of the newest snapshot that is known to have been whole on all hosts; 0 if there was none.
        history: the history of the job on this host.
        is_first: whether this process was the first one of this start on this host; it records the events that concern all ranks.

    Raises:
        ConfigurationError: the folder cannot be made, belongs to another user, or another job of this name runs on this host.
    """

    def __init__(self, base: Path, name: str, fit: int, start: str = "") -> None:
        self.base, self._job, self._fit = base, base / name, fit
        self.path = self._job / f"fit-{fit}"
        self.history = History(self._job / _HISTORY)
        self.is_first = False
        self.began: float | None = None
        self._behind_since: float | None = None  # when the last of the steps that must be repeated was done
        self.reached = self.newest = 0
        for other in base.glob(f"{_PREFIX}-{os.geteuid()}-*") if base.is_dir() else ():
            if other != self._job:
                _remove_if_ended(other)
        try:
            self._job.mkdir(mode=0o700, exist_ok=True)
            found = self._job.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise OSError("it is another user's, or others can write to it")
            end = time.monotonic() + _ENDING_S
            while not self._begin(start):
                if time.monotonic() > end:
                    raise ConfigurationError(
                        f"snapshot_every_n_steps: another job of the same name trains on host {socket.gethostname()}, or a process of this one's last "
                        f"start is left there ({self._job}): two jobs that run at the same time need two names (torchrun --rdzv-id=..., or "
                        f"another MASTER_PORT)"
                    )
                time.sleep(_PAUSE_S)
        except OSError as error:
            raise ConfigurationError(
                f"snapshot_every_n_steps needs a folder in the memory of host {socket.gethostname()}, and {self._job} cannot be used: "
                f"{error}. Name another one: HolmesStrategy(snapshot_folder=...)"
            ) from None

    def _begin(self, start: str) -> bool:
        """Take the lock and join this attempt, whose number the first of its processes on this host increments. Return False if processes of
        another start of a job of this name are alive."""
        with _alone(self._job / _MUTEX):
            lock, path = os.open(self._job / _LOCK, os.O_CREAT | os.O_RDWR, 0o600), self._job / _ATTEMPT
            attempt, _, found = path.read_text().partition(" ") if path.exists() else ("0", "", start)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                attempt, self.is_first = str(int(attempt) + 1), True
                for left in self._job.glob(f"{_PROCESS}.*"):
                    left.unlink()
                _write(path, f"{attempt} {start}")
            except BlockingIOError:  # held by another rank, by this process for an earlier fit, or by another job
                if found != start:
                    os.close(lock)
                    return False
            fcntl.flock(lock, fcntl.LOCK_SH)
            _locks.add(lock)
            self._lock = lock
            _present(self._job).touch()
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._look_back(int(attempt))
            return True

    def _look_back(self, attempt: int) -> None:
        """Read what earlier attempts at this fit have recorded."""
        path = self.path / _BEGAN
        if not path.exists():
            _write(path, str(attempt))
        elif int(path.read_text()) < attempt:
            self.began = path.stat().st_mtime
            if self.is_first:
                self._behind_since = (self.path / _PROGRESS).stat().st_mtime
        self._progress = os.open(self.path / _PROGRESS, os.O_CREAT | os.O_RDWR, 0o600)
        self.reached = int(os.pread(self._progress, _DIGITS, 0) or 0)
        with contextlib.suppress(FileNotFoundError):
            self.newest = int((self.path / _WHOLE).read_text() or 0)

    def note_step(self, step: int) -> None:
        """Record that ``step`` steps have been done."""
        with contextlib.suppress(OSError):  # no space left: after a restart the reported number is wrong
            os.pwrite(self._progress, b"%0*d" % (_DIGITS, step), 0)
        if self._behind_since is not None and step > self.reached:
            lost_s = time.time() - self._behind_since
            self.history.note("caught up", f"step {self.reached} is done again, and step {step}", lost_s=lost_s)
            self._behind_since = None

    def note_whole(self, step: int) -> None:
        """Record that the snapshot of this step, with everything it needs, is whole on all hosts."""
        with contextlib.suppress(OSError):
            _write(self.path / _WHOLE, str(step))

    def note_checkpoint(self, path: str, step: int) -> None:
        """Record that a checkpoint of the fit has been saved."""
        try:
            with (self.path / _SAVED).open("a") as file:
                print(json.dumps([os.path.abspath(path), step]), file=file)
        except OSError as error:
            warnings.warn(f"{path} will not be found if this job is started again without a snapshot: {error}")

    def saved_checkpoints(self) -> dict[str, int]:
        """The recorded checkpoints, those of earlier attempts included: path to step."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / _SAVED).read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a line cut off because no space was left
                    path, step = json.loads(line)
                    found[path] = step
        return found

    def clear(self, keep: Path | None = None) -> None:
        """Remove the snapshots of a fit that has succeeded, except ``keep``: the script continues, and if it fails the job is started again."""
        with contextlib.suppress(FileNotFoundError):  # a rank of this host has already ended and removed everything
            for path in self.path.iterdir():
                if path.is_dir() and path != keep:
                    atomic.delete(path)

    def ended_fits(self) -> list[Path]:
        """The snapshots of earlier fits of this process."""
        before = [self._job / f"fit-{number}" for number in range(self._fit)]
        return [path for fit in before if fit.is_dir() for path in fit.iterdir() if path.is_dir()]

    def remove_at_exit(self, *, well: bool) -> None:
        """If ``well``, register the removal of the job's folder: the last of this host's processes to exit removes it if all have ended well.
        Otherwise cancel that."""
        atexit.unregister(_leave_job)
        if well:
            note_exits()
            atexit.register(_leave_job, self._job)

    def release(self) -> None:
        """Release the lock, as the end of the process does."""
        _locks.discard(self._lock)
        os.close(self._lock)
        os.close(self._progress)


_locks: set[int] = set()
"""The descriptors of the locks that this process holds. Forked data workers, which may outlive a killed process, close them."""


def _hold_none() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_hold_none)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A mutual exclusion between the processes of this host, by a lock on the file ``path``."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if this process is killed or no space is left."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _present(job: Path) -> Path:
    """The path of this process's marker file in its job's folder, which it removes when it ends well."""
    return job / f"{_PROCESS}.{_START}-{os.getpid()}"


def _leave_job(folder: Path) -> None:
    """At exit of a process whose last fit has succeeded: remove its marker, and the folder if no other process's marker is left."""
    why = why_not_well()
    if why:
        return History(folder / _HISTORY).note("failed", f"a process ends after its fit has ended well: {why}")
    with contextlib.suppress(OSError), _alone(folder / _MUTEX):  # another process may have removed the folder
        _present(folder).unlink(missing_ok=True)
        if next(folder.glob(f"{_PROCESS}.*"), None) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_ended(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank may be removing it
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            newest = max(path.stat().st_mtime for path in (folder, *folder.glob("*/*")))
            if time.time() - newest > _ENDED_S:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOnHost:
    """The progress of a fit: its last step and when it was done; and its snapshots on this host, newest first, each as step and time of writing."""

    name: str
    step: int
    step_at: float
    snapshots: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnHost:
    """A job's folder in the memory of this host. ``lives``: whether one of its processes holds the lock."""

    path: Path
    lives: bool
    fits: tuple[FitOnHost, ...]
    events: list[Event]


def jobs_on_host(base: Path) -> list[JobOnHost]:
    """This user's jobs that have a folder in ``base``."""
    jobs = []
    for path in sorted(base.glob(f"{_PREFIX}-{os.geteuid()}-*")):
        with contextlib.suppress(OSError):  # the folder is being removed
            fits = [_fit_on_host(fit) for fit in sorted(path.glob("fit-*"))]
            events = History(path / _HISTORY).read()
            jobs.append(JobOnHost(path=path, lives=_lives(path), fits=tuple(fits), events=events))
    return jobs


def _fit_on_host(path: Path) -> FitOnHost:
    progress = path / _PROGRESS
    step_at = progress.stat().st_mtime
    whole = [(about[0], p.stat().st_mtime) for p in path.iterdir() if (about := read_name(p.name)) is not None]
    return FitOnHost(
        name=path.name, step=int(progress.read_text() or 0), step_at=step_at, snapshots=tuple(sorted(whole)[::-1])
    )


def _lives(folder: Path) -> bool:
    descriptor = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def snapshot_name(step: int, commit: Commit | None = None) -> str:
    """The name of a snapshot's folder. ``commit``: the commit of the parameters and states that are on optimizer nodes and not in the snapshot."""
    return str(step) if commit is None else f"{step}{_COMMIT}{commit[0]}{_COMMIT}{commit[1]}"


def read_name(name: str) -> tuple[int, Commit | None] | None:
    """The inverse of :func:`snapshot_name`; None if ``name`` is not that of a snapshot."""
    step, *commit = name.split(_COMMIT)
    if not step.isdigit() or len(commit) not in (0, 2):
        return None
    return int(step), (commit[0], int(commit[1])) if commit else None


def find_newest(
    folder: Path, all_gather: Callable[[Any], list[Any]], have_kept: Callable[[str, int], bool] | None = None
) -> tuple[Path, int] | None:
    """Return the newest snapshot of which the job's present hosts together hold every part, and its step. All ranks must call.

    Args:
        have_kept: returns whether optimizer nodes still hold the values of a commit; all ranks call it together. None: snapshots with a
            commit are left out.
    """
    here: list[tuple[int, str, str, list[str], list[str]]] = []
    for path in folder.iterdir():
        about = read_name(path.name)
        if about is not None and (about[1] is None or have_kept is not None):
            with contextlib.suppress(CheckpointError):
                manifest = Manifest.load(path)
                needed = [n for n, f in manifest.files.items() if f.file_system is not None or n == REST]
                here.append((about[0], path.name, manifest.id, needed, sorted(manifest.present_files(path))))
    present: dict[tuple[int, str, str], set[str]] = {}
    wanted: dict[tuple[int, str, str], set[str]] = {}
    for found in all_gather(here):
        for step, name, token, needed, files in found:
            present.setdefault((step, name, token), set()).update(files)
            wanted[step, name, token] = set(needed)
    for step, name, chosen in sorted(wanted, reverse=True):
        if not wanted[step, name, chosen] <= present[step, name, chosen]:
            continue
        about = read_name(name)
        if about is not None and about[1] is not None and (have_kept is None or not have_kept(*about[1])):
            continue
        if any(found == name and token != chosen for _, found, token, *_ in here):
            atomic.delete(folder / name)  # this host's is of another attempt, and was not completed on all hosts
        return folder / name, step
    return None


class SnapshotManager(CheckpointManager):
    """Saves snapshots in a thread. If a snapshot cannot be written, a warning says so, and the one before it is kept.

    Args:
        folder: the folder of this fit.
        group: makes the process group for copies; called by all ranks together, and only if there are several file systems.
        clusters: the cluster number of each rank.
    """

    def __init__(self, folder: SnapshotFolder, *, group: Callable[[], Any], clusters: Sequence[int]) -> None:
        super().__init__(distributed=True, background=True)
        self._folder = folder
        self._make_group = group
        self._clusters = clusters
        self._copies: Copies | None = None
        self._admitted = False
        self.whole: Path | None = None
        """The newest snapshot that is whole on all hosts."""
        self.beside_nodes: Path | None = None
        """The newest whole snapshot whose parameters and states are held by optimizer nodes."""
        self.write_s = 0.0
        """Seconds that the last snapshot with parameters took to be written in the background."""
        self._latest: Path | None = None  # the latest snapshot; it may still be being written

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._writer.is_busy

    def settle(self, job: Job) -> None:
        """Wait for the snapshot that is being written. All ranks must call; afterwards all of them know whether it is whole."""
        problem = ""
        try:
            self._writer.wait()
        except Exception as error:
            problem = str(error)
        problems = [said for said in job.all_gather(problem) if said]
        if problems and job.rank == 0:
            warnings.warn(f"a snapshot was not written, and the one before it stays: {problems[0]}")
        about = None if self._latest is None else read_name(self._latest.name)
        if not problems and about is not None:
            step, commit = about
            if commit is None:
                self.whole, self.write_s = self._latest, self._writer.last_s
                self._folder.note_whole(step)
            else:  # not recorded as whole: it needs the nodes' commit, so not resuming from it does not mean that a host's memory was lost
                self.beside_nodes = self._latest
        self._latest = None

    def save_folder(self, job: Job, checkpoint: dict[str, Any], path: Any, **about: Any) -> None:
        self.settle(job)
        super().save_folder(job, checkpoint, path, **about)
        self._latest = Path(path)

    def folder_save(
        self, job: Job, checkpoint: dict[str, Any], target: Path, token: str, systems: FileSystems, *about: Any
    ) -> FolderSave:
        save = super().folder_save(job, checkpoint, target, token, systems, *about)
        if self._copies is None and len(systems.leaders) > 1:
            self._copies = Copies(self._make_group(), partner_of(systems.of_rank, self._clusters))
        if not self._admitted:
            self._check_room(job, systems, save)
            self._admitted = True
        kept = {target, self.whole, self.beside_nodes, atomic.temporary_path(target, token)}
        old = []
        if systems.is_leader(job.rank):
            old = [p for p in target.parent.iterdir() if p.is_dir() and p not in kept] + self._folder.ended_fits()
        save = replace(save, prepare=functools.partial(_remove, old))
        return save if self._copies is None else replace(save, copy=self._copies)

    def leave_to_others(self, job: Job, save: FolderSave) -> FolderSave:
        """Leave nothing to other writers if hosts keep copies for each other: copies are made of the files that the ranks write themselves."""
        return save if self._copies is not None else super().leave_to_others(job, save)

    def _check_room(self, job: Job, systems: FileSystems, save: FolderSave) -> None:
        """Raise ConfigurationError if two snapshots do not fit in the folder's file system. All ranks must call."""
        own = sum({same_memory(name, value): num_bytes(value) for name, value in save.values.items()}.values())
        sizes = job.all_gather(own + len(save.rest))
        system = systems.of_rank[job.rank]
        ranks = [rank for rank, number in enumerate(systems.of_rank) if number == system]
        kept = [*ranks, *(s for r in ranks if self._copies is not None for s in self._copies.senders(r))]
        needed = int(2 * _ROOM * sum(sizes[rank] for rank in kept))
        usage = shutil.disk_usage(save.target.parent)
        freed = (*save.target.parent.iterdir(), *self._folder.ended_fits())
        held = sum(p.stat().st_size for folder in freed if folder.is_dir() for p in folder.iterdir())
        problem = ""
        if needed > usage.free + held:
            problem = (
                f"two snapshots of this host's ranks{', with copies of others,' if len(kept) > len(ranks) else ''} take "
                f"{needed / 1e6:.0f} MB, and {self._folder.base} on host {socket.gethostname()} has {usage.free / 1e6:.0f} MB left of "
                f"{usage.total / 1e6:.0f}: make it larger (docker run --shm-size=..., a Kubernetes volume with medium: Memory), or name "
                f"another folder: HolmesStrategy(snapshot_folder=...)"
            )
        problems = [said for said in job.all_gather(problem) if said]
        if problems:
            raise ConfigurationError(problems[0])


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        atomic.delete(path)
