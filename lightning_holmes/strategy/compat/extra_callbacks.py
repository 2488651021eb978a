"""Adds callbacks to a trainer for the duration of a run, and the one that every run has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_holmes.lightning_package import pl


@contextmanager
def extra_callbacks(
    trainer: "pl.Trainer", *, first: Sequence[pl.Callback] = (), last: Sequence[pl.Callback] = ()
) -> Iterator[None]:
    """Inside, the trainer also has these callbacks: ``first`` before its own, ``last`` after them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [*first, *callbacks, *last]
    try:
        yield
    finally:
        ours = {id(callback) for callback in (*first, *last)}
        callbacks[:] = [callback for callback in callbacks if id(callback) not in ours]


class ModuleStateSync(pl.Callback):
    """Sends the module state that steps have changed to all ranks, before epoch-end hooks and validation.

    A run puts it first among the trainer's callbacks.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.synchronise_module_state()  # type: ignore[attr-defined]

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_epoch_end(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING and not trainer.sanity_checking:
            self.on_train_epoch_end(trainer, pl_module)  # validation may read state that training has changed

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # before other callbacks, which may save a checkpoint here and wait for ranks that have not failed
        trainer.strategy.on_exception(exception)
