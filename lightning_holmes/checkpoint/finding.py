"""Find the whole checkpoints of a folder.

Lightning's ``ckpt_path="last"`` takes the newest file named last, whole or torn; here torn checkpoints are skipped with a
warning.
"""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.manifest import MANIFEST, REST, missing_files
from lightning_holmes.checkpoint.torch_file import is_cut_off


def is_folder(path: Any) -> bool:
    """Whether ``path`` is a checkpoint folder of this package, whole or torn."""
    return (
        isinstance(path, str | os.PathLike)
        and os.path.isdir(path)
        and any((Path(path) / name).exists() for name in (MANIFEST, REST))
    )


def problems(path: Path) -> list[str]:
    """Messages that say why ``path`` is not a whole checkpoint; empty if it is. Flipped bits are not detected here, but when it is read."""
    if path.is_dir():
        return missing_files(path)
    return [f"{path} is cut off"] if is_cut_off(path) else []


def whole_checkpoints(paths: set[str], folder: Path) -> set[str]:
    """Those of ``paths`` that are whole. If none is, the newest other whole checkpoint of the folder; if ``paths`` is empty, only if that is an
    old checkpoint whose replacement was interrupted."""
    found = set()
    for path in sorted(paths):
        wrong = problems(Path(path))
        if wrong:
            warnings.warn(f"the checkpoint {path} is torn and is passed over: {wrong[0]}")
        else:
            found.add(path)
    if found or not folder.is_dir():
        return found
    names = [p for p in folder.iterdir() if p.suffix == ".ckpt" and str(p) not in paths]
    names += [p for p in folder.glob(f"{atomic.PREVIOUS}-*") if p.is_dir()]  # killed between two renames
    for other in sorted((p for p in names if p.exists()), key=lambda p: p.stat().st_mtime, reverse=True):
        if not problems(other):
            if paths or other.name.startswith(atomic.PREVIOUS):
                warnings.warn(f"resuming from {other}, the youngest whole checkpoint of {folder}")
                return {str(other)}
            break
    return set()


def newest_whole(paths: Iterable[str]) -> str | None:
    """The newest of these checkpoints that exists and is whole; None if there is none."""
    found = [(path.stat().st_mtime, path) for path in map(Path, paths) if path.exists()]
    return next((str(path) for _, path in sorted(found, reverse=True) if not problems(path)), None)
