"""A callback that saves checkpoints in mid-run."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


class Saves(Callback):
    """Saves at the end of an epoch's training, or after the batch ``batch_idx``; if ``epoch`` is given, in this epoch only."""

    def __init__(self, path: Path, *, batch_idx: int | None = None, epoch: int | None = None) -> None:
        self.path, self.batch_idx, self.epoch = path, batch_idx, epoch

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx and self.epoch in (None, trainer.current_epoch):
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self.batch_idx is None and self.epoch in (None, trainer.current_epoch):
            trainer.save_checkpoint(self.path)
