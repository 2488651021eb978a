"""Everything of Lightning and torchmetrics that this package uses and they do not document; tests/test_lightning_private.py
fails when it changes.

No other file imports a name with a leading underscore from them, or reads one on their objects. What is exchanged while
a run lasts is named here, and exchanged by :class:`lightning_holmes.strategy.compat.replacements.Replacements`.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

SubprocessLauncher = _SubprocessScriptLauncher
"""Starts the other processes of this host as the same script, where nobody else does, and calls what a Trainer runs."""

FIND_CHECKPOINT = "_parse_ckpt_path"
"""Of :func:`checkpoint_connector`: ``(state_fn, ckpt_path, ...)`` to the path of a checkpoint, asked once a Trainer call,
before the strategy is set up."""

FIND_LAST_CHECKPOINTS = "_find_last_checkpoints"
"""Of a ModelCheckpoint: ``(trainer)`` to the paths in its folder that are called last; asked by FIND_CHECKPOINT."""


def checkpoint_connector(trainer: "pl.Trainer") -> Any:
    """What finds and opens checkpoints for a trainer."""
    return trainer._checkpoint_connector


def checkpoint_folder(callback: ModelCheckpoint, trainer: "pl.Trainer") -> str:
    """The folder that a ModelCheckpoint writes to, also before its ``setup``."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
