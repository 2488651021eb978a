"""The tuner: what it finds, what it leaves behind, and that the fit after it is as without it."""

from typing import Any

import pytest
from comparing import state_of
from contract import Run, each
from contract_models import Net, Rows, batches, same
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader


def found(run: Run, module: Any, **options: Any) -> Any:
    """Search a learning rate in eight steps; return the trainer and the finder."""
    trainer = run.trainer()
    options = {"num_training": 8, "early_stop_threshold": None} | options
    return trainer, Tuner(trainer).lr_find(module, batches(16), **options)


@each(exponential="exponential", linear="linear")
def case_rates_are_tried(run: Run, mode: str):
    _, finder = found(run, Net(), mode=mode, min_lr=0.01, max_lr=0.1)
    rates = finder.results["lr"]
    assert len(rates) == 8 and rates[-1] == pytest.approx(0.1, rel=0.5)
    assert rates == sorted(rates)
    return finder.results


def case_the_module_is_as_before(run: Run):
    module = Net()
    before = state_of(module)
    trainer, _ = found(run, module)
    assert same(state_of(module), before)
    assert trainer.global_step == 0


def case_the_fit_after_it_is_a_whole_one(run: Run):
    module = Net()
    trainer, _ = found(run, module, update_attr=False)
    trainer.fit(module, batches(4))
    assert trainer.global_step == 4
    return state_of(module)


def case_a_callback_finds_the_rate_before_the_fit(run: Run):
    module = Net()
    callback = LearningRateFinder(num_training_steps=14, early_stop_threshold=None)
    trainer = run.fit(module, batches(16), callbacks=[callback])
    assert module.lr == callback.optimal_lr.suggestion()
    assert trainer.global_step == 16
    return state_of(module), module.lr


class Sized(Net):
    """Makes its own loaders, with a batch size that a tuner may change."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(32), batch_size=self.batch_size)

    val_dataloader = train_dataloader


@each(doubling="power", by_halves="binsearch")
def case_a_batch_size_is_found(run: Run, mode: str):
    module = Sized()
    size = Tuner(run.trainer()).scale_batch_size(module, mode=mode, max_trials=2, steps_per_trial=1)
    assert size == module.batch_size and size >= 3
    return size


def case_a_callback_finds_the_size_before_the_fit(run: Run):
    module = Sized()
    trainer = run.trainer(callbacks=[BatchSizeFinder(steps_per_trial=1, max_trials=2)])
    trainer.fit(module)
    assert trainer.global_step == 32 // module.batch_size
    return module.batch_size, state_of(module)
