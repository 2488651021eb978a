"""JobFolder: a job's folder in the memory of its host, which the job finds again when it is started again.

    folder = JobFolder(MEMORY / job_name(os.environ, "10.0.0.1", 29500), start)     # each rank; start: the same on all
    folder.snapshot(fit, 100)                # where a snapshot is saved
    folder.remove_at_exit()

A process that lives holds a lock in the folder, on a file that is named after this start of the job. No file needs another one, so that a
start that is killed at any moment is in nobody's way. Folders of jobs that ended long ago are removed.
"""

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import psutil

from lightning_holmes.errors import ConfigurationError

MEMORY = Path("/dev/shm")
_PREFIX = "lightning_holmes"
_START, _SAVED = "start-", "checkpoints"
_READ = {".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"}
"""Suffixes of files that a command may name and that a run does not write."""
_ENDED_S = 3600.0  # a job without a living process is not expected to be started again after this time
_ENDING_S = 45.0  # processes that a launcher terminates are gone within this time
_PAUSE_S = 0.1


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


def name_start() -> str:
    """A name for this start of the job, on the rank that decides it: the same in all fits of this process."""
    process = psutil.Process()
    return f"{socket.gethostname()}-{process.pid}-{process.create_time()}"


class JobFolder:
    """A job's folder on this rank's host, readable by its user alone.

    Args:
        path: where it is; its name is a :func:`job_name`.
        start: a :func:`name_start`, the same on all ranks.

    Attributes:
        is_restart: whether this process has found that an earlier start did not end well.

    Raises:
        ConfigurationError: the folder cannot be made, belongs to another user, or another job of this name runs on this host.
    """

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self.is_restart = False
        for other in path.parent.glob(f"{_PREFIX}-{os.geteuid()}-*"):
            with contextlib.suppress(OSError):  # another rank may be removing it
                newest = max(p.stat().st_mtime for p in (other, *other.glob("*/*"), *other.glob("*")))
                if other != path and time.time() - newest > _ENDED_S:
                    _remove_if_unused(other)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise OSError("it is another user's, or others can write to it")
            own = path / f"{_START}{start}"
            self._lock = _lock(own)
            self._wait_for_others(own)
        except OSError as error:
            raise ConfigurationError(
                f"snapshot_every_n_steps needs a folder in the memory of host {socket.gethostname()}, and {path} cannot be used: {error}"
            ) from None

    def _wait_for_others(self, own: Path) -> None:
        """Wait until the processes of other starts have ended, and remove their files."""
        end = time.monotonic() + _ENDING_S
        while others := [path for path in self.path.glob(f"{_START}*") if path != own]:
            removed = [_remove_if_free(path) for path in others]
            self.is_restart |= any(removed)
            if not all(removed):
                if time.monotonic() > end:
                    raise ConfigurationError(
                        f"snapshot_every_n_steps: another job of the same name trains on host {socket.gethostname()}, or a process of this one's "
                        f"last start is left there ({self.path}): two jobs that run at the same time need two names (torchrun --rdzv-id=..., "
                        f"or another MASTER_PORT)"
                    )
                time.sleep(_PAUSE_S)

    def count_fit(self) -> int:
        """The number of fits that this start has begun before: a restarted process begins the same fits in the same order. Called on one rank."""
        count = os.fstat(self._lock).st_size
        os.write(self._lock, b".")
        return count

    def snapshot(self, fit: int, step: int) -> Path:
        """The path of a fit's snapshot of a step."""
        return self.path / f"{fit}-{step}"

    def snapshots(self, fit: int) -> dict[int, Path]:
        """The snapshots of a fit on this host, whole or not, by step."""
        found = {path: path.name.removeprefix(f"{fit}-") for path in self.path.glob(f"{fit}-*")}
        return {int(step): path for path, step in found.items() if step.isdecimal()}

    def note_checkpoint(self, fit: int, path: str, step: int) -> None:
        """Record that a checkpoint of a fit has been saved."""
        try:
            with (self.path / _SAVED).open("a") as file:
                print(json.dumps([fit, os.path.abspath(path), step]), file=file)
        except OSError as error:
            warnings.warn(f"{path} will not be found if this job is started again without a snapshot: {error}")

    def saved_checkpoints(self, fit: int) -> dict[str, int]:
        """The steps of the checkpoints that were recorded of a fit, by path."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / _SAVED).read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line cut off because no space was left
                    of_fit, path, step = json.loads(line)
                    found |= {path: step} if of_fit == fit else {}
        return found

    def remove_at_exit(self) -> None:
        """Remove the folder when the last of this host's processes exits, unless an uncaught exception ends this one: the script goes on after its
        fit, and if it fails the job is started again."""
        self.keep_at_exit()
        atexit.register(_remove_if_last, self.path, self._lock)

    def keep_at_exit(self) -> None:
        """Cancel :meth:`remove_at_exit`."""
        atexit.unregister(_remove_if_last)


def _lock(path: Path) -> int:
    """Make the file and lock it, together with other ranks. The lock ends with this process; forked data workers do not inherit it."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_SH)
        if path.exists():
            return descriptor
        os.close(descriptor)  # a later start has taken it for one of a process that has ended


def _remove_if_free(path: Path) -> bool:
    """Remove a start's file if no living process has locked it; return whether it is gone. Must not be called for a file that this process has locked:
    closing it would end that lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # before the lock is released: who waits for it looks whether the file is still there
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_if_last(folder: Path, lock: int) -> None:
    """At exit of a process whose last fit has ended well: remove the folder if no other process of this host needs it."""
    if getattr(sys, "last_value", None) is not None:
        return
    os.close(lock)
    with contextlib.suppress(OSError):  # another process may have removed the folder
        _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    if all(_remove_if_free(path) for path in folder.glob(f"{_START}*")):
        shutil.rmtree(folder, ignore_errors=True)
