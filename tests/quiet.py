"""A trainer for the fits of tests: on the CPU, and it prints and writes nothing unless it is asked to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyExperiment, Logger

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(strategy: Any = "auto", **options: Any) -> Trainer:
    """Return a trainer with ``options``; plain Lightning's without a strategy."""
    return Trainer(strategy=strategy, **(QUIET | options))


class Recorder(Logger):
    """A logger that keeps ``lines`` of (step, values) on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, dict[str, float]]] = []

    name, version = "recorder", 0

    @property
    def experiment(self) -> Any:
        return DummyExperiment()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def saves(
    path: Path, hook: str = "on_train_epoch_end", at: Callable[[Trainer], bool] = lambda trainer: True
) -> LambdaCallback:
    """Return a callback that saves a checkpoint in mid-run: in its hook, where ``at`` holds."""
    return LambdaCallback(**{hook: lambda trainer, *_: at(trainer) and trainer.save_checkpoint(path)})
