"""Files of torch.save: written so that a full disk is told as one, and read without running any code in them.

Everything this package reads from a checkpoint passes through :func:`load_bytes` or :func:`load_file`, which use torch.load for
tensors and plain data only. ``weights_only=False``, which a user may give for a file that they trust, is the only exception.
"""

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_holmes.checkpoint.value_file import Outlet, save_to
from lightning_holmes.errors import CheckpointError


def save_file(path: Path, value: Any) -> None:
    """Write a file. Raises OSError if the system does."""
    with path.open("wb") as file:
        save_to(Outlet(file), value)


def load_bytes(data: bytes, source: str, *, weights_only: bool = True) -> Any:
    """Return the content of ``data``, on the host.

    Raises:
        CheckpointError: the data are damaged, or hold more than tensors and plain data.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except Exception as error:
        raise _explained(error, source) from None


def load_file(path: Path, *, weights_only: bool = True, damaged: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a checkpoint of Lightning, on the host; tensors are read when they are used.

    Args:
        damaged: what :func:`damaged_records` has found, if it was called.

    Raises:
        CheckpointError: the file is damaged, is no checkpoint, or holds more than tensors and plain data.
    """
    if damaged:
        raise CheckpointError(f"{path} is damaged: the checksum of {', '.join(damaged[:3])} is wrong")
    try:
        found = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _explained(error, str(path)) from None
    if not isinstance(found, dict) or "state_dict" not in found:
        raise CheckpointError(f"{path} is no checkpoint of Lightning's: it has no state_dict")
    return found


def is_cut_off(path: Path) -> bool:
    """Whether a file of torch.save lacks its end, which holds its table of contents."""
    try:
        with path.open("rb") as file:
            return file.read(2) in (b"PK", b"") and not zipfile.is_zipfile(path)
    except OSError:
        return True


def damaged_records(path: Path) -> list[str]:
    """The records of a file of torch.save whose checksum is wrong. Empty if the file has no checksums: torch was set to write none,
    or the file has the format of torch before 1.6."""
    if not zipfile.is_zipfile(path) and not is_cut_off(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
            wrong = [name for name in names if _is_wrong(archive, name)]
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        return [f"{path.name}: {error}"]
    return [] if len(wrong) == len(names) else wrong


def _is_wrong(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        with archive.open(name) as record:
            while record.read(1 << 22):
                pass
    except zipfile.BadZipFile:
        return True
    return False


def _explained(error: Exception, source: str) -> CheckpointError:
    if isinstance(error, pickle.UnpicklingError) and ("Unsupported" in str(error) or "Weights only" in str(error)):
        detail = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        return CheckpointError(
            f"{source} holds something that is neither a tensor nor plain data, and that could run code when it is "
            f"read ({detail.strip() or type(error).__name__}); if you trust the file, pass weights_only=False"
        )
    lines = str(error).strip().splitlines()
    return CheckpointError(f"{source} is damaged: {type(error).__name__}: {lines[0] if lines else ''}")
