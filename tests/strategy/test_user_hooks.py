"""Which objects' hooks the user has overridden, and after which steps hooks may read what is left on the module."""

import functools
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_holmes.strategy.user_hooks import steps_whose_state_is_read

pytestmark = pytest.mark.versions


class Clock(pl.Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        pass


class Transfers(pl.LightningModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("module", "callbacks", "steps"),
    [
        (pl.LightningModule(), [ModelCheckpoint()], set()),
        (pl.LightningModule(), [Clock()], {"validation_step"}),
        (Transfers(), [LambdaCallback(on_predict_batch_start=lambda *_: None)], {"training_step", "predict_step"}),
    ],
)
def test_hooks_of_each_batch_may_read_what_a_step_left(module: Any, callbacks: Any, steps: set[str]) -> None:
    assert steps_whose_state_is_read(module, callbacks) == steps


MODULE, FACTOR = pl.LightningModule(), 0.5


def _kept_in(module: Any) -> Any:
    return lambda step: 1.0 / (1.0 + module.pace)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda step: FACTOR**step, False),
        (functools.partial(lambda step, warm_up: min(1.0, step / warm_up), warm_up=5), False),
        (_kept_in(pl.LightningModule()), True),
        (lambda step: 1.0 / (1.0 + MODULE.pace), True),
        (pl.LightningModule().forward, True),
        (functools.partial(lambda step, module: module.pace, module=pl.LightningModule()), True),
    ],
)
def test_a_scheduler_that_knows_the_module_may_read_what_a_step_left(function: Any, reads: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    module, steps = pl.LightningModule(), {"training_step"} if reads else set()
    assert steps_whose_state_is_read(module, [], [constant]) == set()
    with mock.patch.object(torch.optim.lr_scheduler.LambdaLR, "step"):  # the module has no pace to read yet
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
    chained = torch.optim.lr_scheduler.ChainedScheduler([constant, scheduler])
    assert steps_whose_state_is_read(module, [], [scheduler]) == steps
    assert steps_whose_state_is_read(module, [], [chained]) == steps


def _paced(module: Any) -> Any:
    """Return a scheduler class whose method refers to the module through a closure."""

    class Paced(torch.optim.lr_scheduler.LRScheduler):
        @property
        def pace(self) -> float:
            return float(getattr(module, "pace", 1.0))

        def get_lr(self) -> list[Any]:
            return [rate * self.pace for rate in self.base_lrs]

    return Paced


class Steady(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        return [FACTOR * rate for rate in self.base_lrs]


class Global(Steady):
    def get_lr(self) -> list[Any]:
        return [rate * getattr(MODULE, "pace", 1.0) for rate in self.base_lrs]


@pytest.mark.parametrize(("kind", "reads"), [(Steady, False), (_paced(pl.LightningModule()), True), (Global, True)])
def test_a_scheduler_of_the_users_class_that_knows_the_module_may_read_it(kind: Any, reads: bool) -> None:
    scheduler = kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    assert steps_whose_state_is_read(pl.LightningModule(), [], [scheduler]) == ({"training_step"} if reads else set())
