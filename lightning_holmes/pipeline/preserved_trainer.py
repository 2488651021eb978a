"""Undo what a trial run of a step changes on the trainer.

    with preserved_trainer(trainer):
        trace_step(module, ...)           # may set trainer.should_stop, or a learning rate

The trainer's attributes and the settings of its optimizers and schedulers are restored. Other objects that it refers
to (callbacks, loggers, loops) are not copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def preserved_trainer(trainer: Any) -> Iterator[None]:
    """Restore the trainer's own attributes, learning rates and schedulers on exit; does nothing if ``trainer`` is None."""
    if trainer is None:
        yield
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    holders = [vars(trainer), *groups, *map(vars, schedulers)]
    saved = [{key: list(v) if type(v) is list else v for key, v in holder.items()} for holder in holders]
    try:
        yield
    finally:
        for holder, before in zip(holders, saved, strict=True):
            for key in [key for key in holder if key not in before]:
                del holder[key]
            for key, value in before.items():
                if type(value) is list and isinstance(holder.get(key), list):
                    holder[key][:] = value
                elif holder.get(key) is not value:
                    holder[key] = value
