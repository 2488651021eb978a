"""Prints when a process is about to run its first training step."""

import time

from lightning.pytorch import Callback


class FirstStepClock(Callback):
    def on_train_batch_start(self, *_: object) -> None:
        print(f"first step begins at {time.time():.2f}", flush=True)
