"""Files and folders that appear whole or not at all, whenever the process is killed.

A file or folder is written under a temporary name beside its target, is synced to the disk, and replaces the target in
one step. Temporary names do not resemble checkpoints, so that programs that list the folder do not take them for one.

    temporary = temporary_path(target, "3f2a")
    ...write temporary...
    replace(temporary, target)
"""

import contextlib
import ctypes
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

SAVING = ".saving"
PREVIOUS = ".previous"
REMOVING = ".removing"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _stem(target: Path) -> str:
    return f"{zlib.crc32(target.name.encode()):08x}"


def temporary_path(target: Path, token: str) -> Path:
    """The path under which a checkpoint for ``target`` is written until it is complete."""
    # with a suffix: torch.save takes a name such as ".saving" for a suffix without a name
    return target.parent / f"{SAVING}-{_stem(target)}-{token}.tmp"


def previous_path(target: Path) -> Path:
    """The path of the old ``target`` while it is replaced, on file systems that cannot exchange two names."""
    return target.parent / f"{PREVIOUS}-{_stem(target)}"


def temporary_paths(target: Path) -> list[Path]:
    """The temporary files and folders that earlier, unfinished writes to ``target`` have left."""
    return sorted(target.parent.glob(f"{SAVING}-{_stem(target)}-*.tmp"))


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; errors are ignored, because some file systems cannot and need not do this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def exchange(left: Path, right: Path) -> bool:
    """Exchange two names in one step; return False if the system or the file system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE)
    except (OSError, AttributeError):  # not Linux, or an old C library
        return False
    return bool(done == 0)


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target`` in one step, and delete the old ``target``. Both may be files or folders.

    Where the system cannot exchange names, the old target has the name :func:`previous_path` for a moment.
    """
    if not os.path.lexists(target) or (source.is_file() and not target.is_dir()):
        os.replace(source, target)
        sync_folder(target.parent)
    elif exchange(source, target):
        sync_folder(target.parent)
        delete(source)
    else:
        previous = previous_path(target)
        delete(previous)
        os.rename(target, previous)
        os.rename(source, target)
        sync_folder(target.parent)
        delete(previous)
    delete(previous_path(target))


def remove(target: Path) -> None:
    """Remove a file or folder: first it is renamed, so that its name is gone in one step, then deleted."""
    if not os.path.lexists(target):
        return
    doomed = target.parent / f"{REMOVING}-{uuid.uuid4().hex[:8]}"
    os.rename(target, doomed)
    delete(doomed)


def delete(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # a read-only file system raises even if the file does not exist
            if path.exists():
                raise


@contextlib.contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A context with the path of a temporary file or folder, which becomes ``target`` at the end, or is deleted after an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target, uuid.uuid4().hex[:8])
    try:
        yield temporary
        if temporary.is_file():
            sync_file(temporary)
        replace(temporary, target)
        for left in temporary_paths(target):
            delete(left)
    except BaseException:
        delete(temporary)
        raise
