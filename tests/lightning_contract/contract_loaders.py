"""Loaders: what a Trainer accepts as data, the batches and their order, and when loaders are asked for again."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from comparing import state_of
from contract import TWO, Run, each, refused
from contract_models import Batches, Net, Rows, batches, stream
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, SequentialSampler


@each(
    a_data_loader=lambda: batches(2),
    without_length=lambda: stream(2),
    an_object_with_iter=lambda: Endless(2),
    a_short_last_batch=lambda: DataLoader(Rows(5), batch_size=3),
    a_dropped_last_batch=lambda: DataLoader(Rows(5), batch_size=2, drop_last=True),
    batches_of_one=lambda: DataLoader(Rows(2), batch_size=1),
    without_automatic_batching=lambda: DataLoader([torch.ones(2, 4), torch.zeros(2, 4)], batch_size=None),
)
@refused("a batch of one replica has 1 samples", TWO, only=["batches_of_one"])
def case_trains_on(run: Run, make: Any):
    module, seen = Net(), Batches()
    trainer = run.fit(module, make(), make(), callbacks=[seen])
    assert trainer.global_step == len(seen.train) == len(seen.validation) == 2
    assert seen.train == seen.validation
    return state_of(module), seen.train


class Endless:
    """An iterable of ``count`` batches that is no DataLoader and has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(self.count))


def case_workers_bring_the_same_batches(run: Run):
    seen = Batches()
    run.fit(Net(), batches(3, num_workers=1), callbacks=[seen])
    assert seen.train == [[0, 1], [2, 3], [4, 5]]


def rows(batches: list[list[int]]) -> list[int]:
    """Return all rows of these batches, sorted."""
    return sorted(index for batch in batches for index in batch)


def case_a_shuffled_loader_gives_the_numbers_of_its_seed(run: Run):
    seen, module = Batches(), Net()
    pl.seed_everything(3, verbose=False)
    run.fit(module, batches(4, shuffle=True), callbacks=[seen], max_epochs=2)
    assert rows(seen.train[:4]) == rows(seen.train[4:]) == list(range(8))
    assert seen.train[:4] != seen.train[4:]
    return seen.train, state_of(module)


@each(
    a_sampler=lambda: DataLoader(Rows(6), batch_size=2, sampler=[5, 4, 3, 2]),
    a_batch_sampler=lambda: DataLoader(Rows(6), batch_sampler=[[5, 4], [3, 2]]),
)
def case_a_sampler_of_the_users_is_kept(run: Run, make: Any):
    seen = Batches()
    run.fit(Net(), make(), callbacks=[seen])
    assert seen.train == [[5, 4], [3, 2]]


class Epochs(SequentialSampler):
    """A sampler that records the epochs it is told."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def case_a_sampler_is_told_each_epoch(run: Run):
    sampler = Epochs(Rows(4))
    run.fit(Net(), DataLoader(Rows(4), batch_size=2, sampler=sampler), max_epochs=3)
    assert list(dict.fromkeys(sampler.told)) == [0, 1, 2]


# several loaders for training


class Several(Net):
    """Trains on the first of several batches, and records which batches there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(torch.cat([part for part in self.parts(batch) if part is not None]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([None if part is None else round(float(part[0, 0]) * 100) for part in self.parts(batch)])

    @staticmethod
    def parts(batch: Any) -> list[Any]:
        return list(batch.values()) if isinstance(batch, dict) else list(batch)


@each(
    as_a_list=lambda: [batches(3), batches(2, 100)],
    as_a_dict=lambda: {"first": batches(3), "second": batches(2, 100)},
    the_longest=lambda: CombinedLoader([batches(3), batches(2, 100)], "max_size_cycle"),
    the_shortest=lambda: CombinedLoader([batches(3), batches(2, 100)], "min_size"),
)
def case_several_loaders_train_side_by_side(run: Run, make: Any):
    loaders = make()
    module = Several()
    trainer = run.fit(module, loaders)
    shortest = isinstance(loaders, CombinedLoader) and len(loaders.flattened) and loaders._mode == "min_size"
    expected = [[0, 100], [2, 102], [4, 100]]
    assert module.seen == (expected[:2] if shortest else expected)
    assert trainer.num_training_batches == len(module.seen)
    return state_of(module)


# where loaders come from


@each(validate="val", test="test", predict="predict")
def case_the_module_s_own_loader_is_evaluated(run: Run, name: str):
    asked: list[int] = []

    def loader(self: Net) -> Any:
        asked.append(self.current_epoch)
        return batches(1)

    module = type("WithLoader", (Net,), {f"{name}_dataloader": loader})()
    getattr(run.trainer(), "validate" if name == "val" else name)(module)
    assert asked == [0]


# data modules


def case_a_data_module_of_data_sets_makes_their_loaders(run: Run):
    data = pl.LightningDataModule.from_datasets(train_dataset=Rows(4), val_dataset=Rows(2), batch_size=2, num_workers=0)
    trainer = run.trainer()
    trainer.fit(Net(), datamodule=data)
    assert trainer.global_step == 2 and trainer.num_val_batches == [1]


def case_an_empty_validation_loader_is_passed_over(run: Run):
    trainer = run.fit(Net(), batches(2), DataLoader(Rows(0), batch_size=2))
    assert trainer.global_step == 2 and trainer.callback_metrics.keys() == {"loss"}


def case_an_epoch_without_length_ends_with_its_data(run: Run):
    trainer = run.fit(Net(), stream(3), stream(2), max_epochs=2, val_check_interval=2)
    assert trainer.global_step == 6
    assert trainer.num_training_batches == float("inf")
