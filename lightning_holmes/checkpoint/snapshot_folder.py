"""Snapshots: checkpoint folders in the memory of the hosts, from which a job that is started again goes on.

    folder = SnapshotFolder(Path("/dev/shm"), name)      # of a fit; each rank makes its own
    manager = SnapshotManager(folder, ...)               # saves as CheckpointManager does, into folder.path / "<step>"
    found = find_newest(folder.path, all_gather)         # (path, step) of what is there as a whole, or None

Every host has its ranks' files, and copies of others' (copies.py). Of the snapshots the newest two stay: the older one until the newer is
whole everywhere. What a snapshot holds is a checkpoint's content.
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
_START = uuid.uuid4().hex  # with its number it names a process, also where containers share the memory
_DIGITS = 20
_READ = {".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"}
"""What a command names and a run does not write."""
_ENDED_S = 3600.0  # a job none of whose processes lives is not started again later than this
_ENDING_S = 45.0  # within which processes that a launcher has told to end are gone
_PAUSE_S = 0.1
_ROOM = 1.05  # of what is written, for headers and the manifest
_COMMIT = "+"

Commit = tuple[str, int]
"""A run's name, and the version of its values: what optimizer nodes keep when workers are lost."""


def job_name(variables: Mapping[str, str], address: str, port: int) -> str:
    """What the folders of a job are called, the same when it is started again, and another for any other job: the launcher's name of the
    job, else the address of rank 0; the user; the script's place, the command, and what stands in the script and in the configurations that
    the command names."""
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

    While a process of the job lives it holds a lock there; folders of jobs that have ended long ago are removed.

    Args:
        base: the memory's; or what the user has named.
        name: of the job.
        fit: how many the process has begun before.
        start: names this start of the job, the same on all its ranks.

    Attributes:
        path: the folder.
        began: when the first attempt at this fit began on this host, in seconds since the epoch; None: this is the first.
        reached: how many steps attempts before have done.
        newest: the step of the newest snapshot that is known to have been whole, here or elsewhere; 0: none is.
        history: of the job on this host.
        is_first: this process was the first of its start of the job to come here; it notes what concerns all.

    Raises:
        ConfigurationError: it cannot be made, is somebody else's, or another job of this name lives on this host.
    """

    def __init__(self, base: Path, name: str, fit: int, start: str = "") -> None:
        self.base, self._job, self._fit = base, base / name, fit
        self.path = self._job / f"fit-{fit}"
        self.history = History(self._job / _HISTORY)
        self.is_first = False
        self.began: float | None = None
        self._behind_since: float | None = None  # when the last of the steps was done that are to be done again
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
        """Take the lock, and be part of this attempt, which the first of its processes here counts. False: processes of another start of a job
        of this name live."""
        with _alone(self._job / _MUTEX):
            lock, path = os.open(self._job / _LOCK, os.O_CREAT | os.O_RDWR, 0o600), self._job / _ATTEMPT
            attempt, _, found = path.read_text().partition(" ") if path.exists() else ("0", "", start)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                attempt, self.is_first = str(int(attempt) + 1), True
                for left in self._job.glob(f"{_PROCESS}.*"):
                    left.unlink()
                _write(path, f"{attempt} {start}")
            except BlockingIOError:  # another rank, or this process for a fit before, has it; or another job
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
        """What attempts before this one have left of the fit."""
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
        """So many steps have been done."""
        with contextlib.suppress(OSError):  # there is no room: a restart tells another number
            os.pwrite(self._progress, b"%0*d" % (_DIGITS, step), 0)
        if self._behind_since is not None and step > self.reached:
            lost_s = time.time() - self._behind_since
            self.history.note("caught up", f"step {self.reached} is done again, and step {step}", lost_s=lost_s)
            self._behind_since = None

    def note_whole(self, step: int) -> None:
        """The snapshot of this step, with all that it needs, is whole on all hosts."""
        with contextlib.suppress(OSError):
            _write(self.path / _WHOLE, str(step))

    def note_checkpoint(self, path: str, step: int) -> None:
        """A checkpoint of the fit has been saved."""
        try:
            with (self.path / _SAVED).open("a") as file:
                print(json.dumps([os.path.abspath(path), step]), file=file)
        except OSError as error:
            warnings.warn(f"{path} will not be found if this job is started again without a snapshot: {error}")

    def saved_checkpoints(self) -> dict[str, int]:
        """The steps of those that were noted, of attempts before too."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / _SAVED).read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # for which there was no room
                    path, step = json.loads(line)
                    found[path] = step
        return found

    def clear(self, keep: Path | None = None) -> None:
        """Remove the snapshots of a fit that has ended well, but for one: the script goes on, and if that fails the job is started again."""
        with contextlib.suppress(FileNotFoundError):  # a rank of this host has ended already, and has removed all
            for path in self.path.iterdir():
                if path.is_dir() and path != keep:
                    atomic.delete(path)

    def ended_fits(self) -> list[Path]:
        """The snapshots of fits that the process has had before this one."""
        before = [self._job / f"fit-{number}" for number in range(self._fit)]
        return [path for fit in before if fit.is_dir() for path in fit.iterdir() if path.is_dir()]

    def remove_at_exit(self, *, well: bool) -> None:
        """Have all that the job has here removed when the last of this host's processes ends, if all of them have ended well; or not any more."""
        atexit.unregister(_leave_job)
        if well:
            note_exits()
            atexit.register(_leave_job, self._job)

    def release(self) -> None:
        """Let go of the lock, as the process's end does."""
        _locks.discard(self._lock)
        os.close(self._lock)
        os.close(self._progress)


_locks: set[int] = set()
"""Which this process holds. Forked data workers, which may live longer than a killed process, hold none of them."""


def _hold_none() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_hold_none)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Inside, no other process of the host is inside."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, though this process may be killed, or there is no room."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _present(job: Path) -> Path:
    """A file of this process in its job's folder, until it has ended well."""
    return job / f"{_PROCESS}.{_START}-{os.getpid()}"


def _leave_job(folder: Path) -> None:
    """This process, whose last fit has ended well, ends."""
    why = why_not_well()
    if why:
        return History(folder / _HISTORY).note("failed", f"a process ends after its fit has ended well: {why}")
    with contextlib.suppress(OSError), _alone(folder / _MUTEX):  # another one may have removed it
        _present(folder).unlink(missing_ok=True)
        if next(folder.glob(f"{_PROCESS}.*"), None) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_ended(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank removes it at this moment
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
    """How far a fit has come, and when; and its snapshots here, newest first: steps, and when they were written."""

    name: str
    step: int
    step_at: float
    snapshots: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnHost:
    """What a job has in the memory of this host. ``lives``: one of its processes holds the lock."""

    path: Path
    lives: bool
    fits: tuple[FitOnHost, ...]
    events: list[Event]


def jobs_on_host(base: Path) -> list[JobOnHost]:
    """This user's jobs that have a folder in ``base``."""
    jobs = []
    for path in sorted(base.glob(f"{_PREFIX}-{os.geteuid()}-*")):
        with contextlib.suppress(OSError):  # it is being removed
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
    """Of the folder of a snapshot; ``commit``: of the parameters and states that are not in it, but on optimizer nodes."""
    return str(step) if commit is None else f"{step}{_COMMIT}{commit[0]}{_COMMIT}{commit[1]}"


def read_name(name: str) -> tuple[int, Commit | None] | None:
    """The inverse; None: it is no snapshot."""
    step, *commit = name.split(_COMMIT)
    if not step.isdigit() or len(commit) not in (0, 2):
        return None
    return int(step), (commit[0], int(commit[1])) if commit else None


def find_newest(
    folder: Path, all_gather: Callable[[Any], list[Any]], have_kept: Callable[[str, int], bool] | None = None
) -> tuple[Path, int] | None:
    """The newest snapshot of which the hosts of today hold every part together, and its step. All ranks must call.

    Args:
        have_kept: whether optimizer nodes still hold what they held at a commit; all ranks call it together. None: such are left out.
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
            atomic.delete(folder / name)  # of another attempt, which did not come so far on all hosts
        return folder / name, step
    return None


class SnapshotManager(CheckpointManager):
    """Saves snapshots in a thread. A snapshot that could not be written is told, and the one before it stays.

    Args:
        folder: of this fit.
        group: makes the group for copies, when it is known that there are several hosts; all ranks call it together.
        clusters: the number of each rank's cluster.
    """

    def __init__(self, folder: SnapshotFolder, *, group: Callable[[], Any], clusters: Sequence[int]) -> None:
        super().__init__(distributed=True, background=True)
        self._folder = folder
        self._make_group = group
        self._clusters = clusters
        self._copies: Copies | None = None
        self._admitted = False
        self.whole: Path | None = None
        """The newest that is whole on all hosts."""
        self.beside_nodes: Path | None = None
        """Likewise of those whose parameters and states optimizer nodes hold."""
        self.write_s = 0.0
        """How long the last one with parameters took to be written, beside the steps."""
        self._latest: Path | None = None  # which may still be written

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self._writer.is_busy

    def settle(self, job: Job) -> None:
        """Wait for what is being written. All ranks must call; afterwards all know whether it is whole."""
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
            else:  # of no use without the nodes' commit: that it is not gone on from does not mean that memory was lost
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
        """Not where hosts keep copies for each other, of what their own ranks write."""
        return save if self._copies is not None else super().leave_to_others(job, save)

    def _check_room(self, job: Job, systems: FileSystems, save: FolderSave) -> None:
        """Refuse a folder that two snapshots do not fit in. All ranks must call."""
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
