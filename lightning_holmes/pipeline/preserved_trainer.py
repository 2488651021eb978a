"""What a step may change on the trainer: undone after a trial run, and brought to all ranks of a pipeline after a real one.

    with preserved_trainer(trainer):
        trace_step(module, ...)           # may set trainer.should_stop, or a learning rate

    before = settings_of(trainer, flags); run(); changed = changed_settings(trainer, flags, before)    # on the rank that runs a step's end
    change_settings(trainer, flags, changed)                                                           # on the others
    change_settings(trainer, flags, before)                                                            # before each microbatch

After a trial the trainer's attributes and the settings of its optimizers and schedulers are restored; of a real step, its plain attributes
(should_stop), the settings of optimizers, the modes of modules and what is frozen count, not other objects that the trainer refers to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_holmes.torch_private import without_torch_functions

Settings = list[dict[Any, Any]]
Flags = Sequence[tuple[Any, str]]
"""Modules and parameters, each with the name of its flag: ``training`` or ``requires_grad``."""

_SENT = (type(None), bool, int, float, str)


@contextmanager
def preserved_trainer(trainer: Any) -> Iterator[None]:
    """Restore the trainer's own attributes, learning rates and schedulers on exit; does nothing if ``trainer`` is None."""
    if trainer is None:
        yield
        return
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    holders = [vars(trainer), *_groups(trainer), *map(vars, schedulers)]
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


def _groups(trainer: Any) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def settings_of(trainer: Any, flags: Flags) -> Settings:
    """Return the trainer's own plain values, such as ``should_stop``; the ``flags``; and the plain values of each parameter group."""
    own, *groups = [{k: v for k, v in each.items() if type(v) in _SENT} for each in (vars(trainer), *_groups(trainer))]
    with without_torch_functions():  # absent parameters are slow to ask
        return [own, {index: getattr(*flag) for index, flag in enumerate(flags)}, *groups]


def changed_settings(trainer: Any, flags: Flags, before: Settings) -> Settings | None:
    """Return what has changed since ``before`` was made by :func:`settings_of`, each value by its key; None if nothing has."""
    changed = [
        {key: value for key, value in now.items() if key not in old or old[key] != value} if now != old else {}
        for now, old in zip(settings_of(trainer, flags), before, strict=True)
    ]
    return changed if any(changed) else None


def change_settings(trainer: Any, flags: Flags, changed: Settings | None) -> None:
    """Set what :func:`settings_of` or :func:`changed_settings` has found, here or on another rank, whose optimizers have the same groups."""
    if changed is not None:
        for key, value in changed[0].items():
            setattr(trainer, key, value)
        with without_torch_functions():
            for index, value in changed[1].items():
                if getattr(*flags[index]) is not value:
                    setattr(*flags[index], value)
        for group, values in zip(_groups(trainer), changed[2:], strict=True):
            group.update(values)
