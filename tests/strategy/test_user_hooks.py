"""Whose hooks the user has written, and after which steps they may read what is left on the module."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_holmes.strategy.user_hooks import hooks_that_read_state, overridden_hooks, users_callbacks


class Clock(pl.Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        pass


class Own(ModelCheckpoint):
    pass


class Transfers(pl.LightningModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_lightnings_own_callbacks_are_not_the_users() -> None:
    mine = [LambdaCallback(), Own(), Clock()]
    assert users_callbacks([ModelCheckpoint(), *mine]) == mine


@pytest.mark.parametrize(
    ("module", "callbacks", "steps"),
    [
        (pl.LightningModule(), [ModelCheckpoint()], set()),
        (pl.LightningModule(), [Clock()], {"validation_step"}),
        (Transfers(), [LambdaCallback(on_predict_batch_start=lambda *_: None)], {"training_step", "predict_step"}),
    ],
)
def test_hooks_of_each_batch_may_read_what_a_step_left(module: Any, callbacks: Any, steps: set[str]) -> None:
    assert hooks_that_read_state(module, callbacks) == steps


def test_hooks_are_told_with_whose_they_are() -> None:
    module, clock = Transfers(), Clock()
    found = list(
        overridden_hooks(module, [clock], ["on_validation_batch_end", "on_after_batch_transfer", "on_fit_end"])
    )
    assert found == [(module, "on_after_batch_transfer"), (clock, "on_validation_batch_end")]
