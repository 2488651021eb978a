"""Print when a process is about to run its first training step, and the loss after each step."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class FirstStepClock(Callback):
    """Prints one line per process in one write, so that lines of several processes do not mix."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            print(f"first step begins at {time.time():.2f}\n", end="", flush=True)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train_loss"])
            print(f"step {trainer.global_step}: loss {loss:.3f} at {time.time():.2f}\n", end="", flush=True)
