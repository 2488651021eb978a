"""A trainer for the fits of tests: on the CPU, and it prints and writes nothing unless it is asked to."""

from typing import Any

from lightning.pytorch import Trainer

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
