"""Where Lightning has no hook: how ``ckpt_path="last"`` finds a checkpoint, and what a plain loader says to a folder.

Lightning takes the youngest file called last, whole or not, and each rank looks in its own file system. Under a
strategy of ours the torn are passed over with a warning, and all ranks take what rank 0 finds.
"""

import functools
import os
import warnings
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.fabric.plugins.io.torch_io as torch_io
import lightning.pytorch.core.saving as saving
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.manifest import MANIFEST, METADATA, missing_files
from lightning_holmes.checkpoint.restricted import is_cut_off
from lightning_holmes.errors import CheckpointFolderError

_INSTALLED = "_lightning_holmes"


@runtime_checkable
class AgreesOnCheckpoint(Protocol):
    """A strategy whose ranks must load the same checkpoint."""

    def agree_on_checkpoint(self, find: Any) -> Any:
        """What ``find()`` returns on rank 0, on every rank."""


def is_folder(path: Any) -> bool:
    """Whether ``path`` is a checkpoint folder of ours, whole or torn."""
    return os.path.isdir(path) and any((Path(path) / name).exists() for name in (MANIFEST, METADATA))


def problems(path: Path) -> list[str]:
    """What keeps ``path`` from being a whole checkpoint, in words. Says nothing about flipped bits: reading does."""
    if path.is_dir():
        return missing_files(path)
    return [f"{path} is cut off"] if is_cut_off(path) else []


def whole_checkpoints(paths: set[str], folder: Path) -> set[str]:
    """Those of ``paths`` that are whole; if none is, the youngest whole checkpoint of the folder."""
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


def install() -> None:
    """Put the hooks in place, once a process. Trainers with other strategies notice nothing, unless they are given
    one of our folders."""
    if hasattr(ModelCheckpoint, _INSTALLED):
        return
    setattr(ModelCheckpoint, _INSTALLED, True)
    find_last = ModelCheckpoint._find_last_checkpoints
    parse = _CheckpointConnector._parse_ckpt_path

    @functools.wraps(find_last)
    def find_whole(self: Any, trainer: Any) -> set[str]:
        paths = find_last(self, trainer)
        if not isinstance(trainer.strategy, AgreesOnCheckpoint):
            return paths
        folder = self._ModelCheckpoint__resolve_ckpt_dir(trainer)
        return whole_checkpoints(paths, Path(folder)) if "://" not in str(folder) else paths

    @functools.wraps(parse)
    def parse_everywhere(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self.trainer.strategy
        looks = ckpt_path in ("last", "hpc") or (ckpt_path is None and SLURMEnvironment.detect())
        if not looks or not isinstance(strategy, AgreesOnCheckpoint):
            return parse(self, state_fn, ckpt_path, *args, **kwargs)
        return strategy.agree_on_checkpoint(lambda: parse(self, state_fn, ckpt_path, *args, **kwargs))

    ModelCheckpoint._find_last_checkpoints = find_whole  # type: ignore[method-assign]
    _CheckpointConnector._parse_ckpt_path = parse_everywhere  # type: ignore[method-assign]
    for module in (torch_io, saving):
        module.pl_load = _explaining(module.pl_load)  # type: ignore[attr-defined]


def _explaining(load: Any) -> Any:
    @functools.wraps(load)
    def load_file(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, os.PathLike)) and is_folder(path_or_url):
            path = os.fspath(path_or_url)
            raise CheckpointFolderError(
                f"{path} is a checkpoint folder of lightning_holmes, which holds one part for each rank. Make one "
                f"ordinary file of it: lightning-holmes convert {path} {path.rstrip('/').removesuffix('.ckpt')}-plain.ckpt"
            )
        return load(path_or_url, *args, **kwargs)

    return load_file
