"""When a step runs, everything exists that Lightning would have made, and a trial of the step leaves no trace.

The baseline is plain Lightning in one process on the same batches; tolerance 1e-5 (fp32).
"""

import collections
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from comparing import assert_alike
from hook_cases import Net, Setting, pairs
from launch import chosen, launch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from quiet import saves
from torch import Tensor, nn
from torch.utils.data import DataLoader


def loader() -> DataLoader[Any]:
    return DataLoader(pairs(16), batch_size=4)


def fit(setting: Setting, module: pl.LightningModule, loaders: Any = None, **options: Any) -> Any:
    trainer = setting.trainer(**options)
    trainer.fit(module, *(loaders or (loader(), loader())))
    return found(trainer, module)


def found(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return logged, {name: value.clone() for name, value in module.state_dict().items()}


class StateFromHooks(Net):
    """Each hook before a step makes something that the step needs."""

    def on_fit_start(self) -> None:
        self.scale = 2.0

    def on_train_start(self) -> None:
        self.offset = torch.ones(())

    def on_train_epoch_start(self) -> None:
        self.of_epoch = self.current_epoch + 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_batch = batch_idx + 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (
            super().training_step(batch, batch_idx) * self.scale * self.of_epoch * self.of_batch
            + self.offset
            + self.bonus
        )

    def on_validation_epoch_start(self) -> None:
        self.outs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.outs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("mean_of_outs", torch.stack(self.outs).mean())
        del self.outs


class GivesBonus(Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.bonus = 0.5  # type: ignore[assignment]


class ChangesTrainer(Net):
    """Its step changes the learning rate, the trainer and hyperparameters: once a batch, although it is also tried beforehand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        self.trainer.should_stop = self.trainer.global_step == 5
        loss = super().training_step(batch, batch_idx)
        self.trainer.total += loss.item()  # type: ignore[attr-defined]
        self.hparams["num_steps"] += 1
        return loss

    def on_train_start(self) -> None:
        self.save_hyperparameters({"num_steps": 0})
        self.trainer.total = 0.0  # type: ignore[attr-defined]

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("of_steps", self.trainer.total + self.hparams["num_steps"])  # type: ignore[attr-defined]


class ReadsElsewhere(Net):
    """Training reads ``stem`` before the layers; validation reads it after them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch | {"x": self.stem(batch["x"])})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        hidden = self.stem(batch["x"])
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        loss = (self.stem(hidden) - batch["y"]).square().mean()
        self.log("val_loss", loss)
        return loss


class Momentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, torch.zeros(())


@dataclasses.dataclass(slots=True)
class Worst:
    loss: float = 0.0
    where: list[int] = dataclasses.field(default_factory=list)


class Scores(dict[str, float]):
    """A container with an attribute."""

    best = 0.0


class KeepsObjects(Net):
    """The step changes objects of all kinds, and hooks read them: after each batch, and at an epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.worst, self.counts = Meter(), Worst(), collections.Counter()
        self.by_name = {"train": Meter(), "table": {"sums": [0.0]}}
        self.recent: collections.deque[float] = collections.deque(maxlen=3)
        self.records: list[Worst] = []
        self.helper = self.meter  # of two names
        self.scores, self.array = Scores(), np.zeros(10_000)
        self.meter.owner = self  # type: ignore[attr-defined]
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = float(loss)
        self.meter.total, self.meter.count, self.meter.last = (
            self.meter.total + value,
            self.meter.count + 1,
            loss.detach(),
        )
        self.counts["steps"] += 1
        self.counts[f"batch {batch_idx}"] += 1
        if value > self.worst.loss:
            self.worst.loss = value
            self.worst.where.append(batch_idx)
        self.by_name["train"].count += 1  # type: ignore[attr-defined]
        self.by_name["table"]["sums"][0] += value  # type: ignore[index]
        self.recent.append(value)
        self.records.append(Worst(value, [batch_idx]))
        self.newest = Worst(value)
        self.scores.best = max(self.scores.best, value)
        self.array[0] += value
        return loss

    def contents(self) -> list[Any]:
        by_name: Any = self.by_name
        assert self.helper is self.meter and isinstance(self.counts, collections.Counter)
        return [
            *(self.meter.total, self.meter.count, float(self.meter.last), self.worst.loss, sum(self.worst.where)),
            *(sum(self.counts.values()), len(self.counts), by_name["train"].count, by_name["table"]["sums"][0]),
            *(sum(self.recent), len(self.records), sum(record.loss for record in self.records), self.newest.loss),
            *(self.scores.best, float(self.array[0])),
        ]

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.contents())
        self.log("average", self.meter.total / self.meter.count)


class KeepsObjectsForEachBatch(KeepsObjects):
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.contents())


def objects(setting: Setting) -> Any:
    """With one microbatch: a step that runs for each of several changes the objects as many times."""
    if setting.holmes is not None:
        setting.holmes = setting.holmes | {"num_microbatches": 1}
    results = []
    for module in (KeepsObjects(), KeepsObjectsForEachBatch()):
        results.append((fit(setting, module), module.seen))
    return results


def state_from_hooks(setting: Setting) -> Any:
    return fit(setting, StateFromHooks(), callbacks=[GivesBonus()])


def state_from_hooks_of_other_runs(setting: Setting) -> Any:
    trainer, module = setting.trainer(), StateFromHooks()
    return trainer.validate(module, loader(), verbose=False), found(trainer, module)


def changes_trainer(setting: Setting) -> Any:
    if setting.holmes is not None:
        setting.holmes = setting.holmes | {"num_microbatches": 1}
    return fit(setting, ChangesTrainer(), max_epochs=3)


def unknown_evaluation(setting: Setting) -> Any:
    return fit(setting, Net(), num_sanity_val_steps=0)


def unknown_evaluation_that_reads_elsewhere(setting: Setting) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fit(setting, ReadsElsewhere(), num_sanity_val_steps=0)
    expected = setting.holmes is not None and setting.holmes.get("pipeline_parallel_size", 1) > 1
    assert any("it reads stem." in str(each.message) for each in told) == (expected and setting.is_first), list(
        map(str, told)
    )
    return result


def known_evaluation_that_reads_elsewhere(setting: Setting) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fit(setting, ReadsElsewhere())
    assert not any("it reads stem." in str(each.message) for each in told)
    return result


def unknown_evaluation_of_parameters_in_shards(setting: Setting) -> Any:
    if setting.holmes is not None:
        setting.holmes = setting.holmes | {"sharding": "parameters"}
    return [fit(setting, module, num_sanity_val_steps=0) for module in (Net(), ReadsElsewhere())]


def saved(setting: Setting) -> Path:
    """Return the checkpoint of a first epoch."""
    path = setting.folder / "first.ckpt"
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(Momentum(), loader(), loader())
    trainer.save_checkpoint(path)
    return path


def resuming(setting: Setting) -> Any:
    """Resume: optimizer states are kept until the first batch, a checkpoint that is saved before holds them, and a learning
    rate that a hook sets stays."""
    path, again = saved(setting), setting.folder / "again.ckpt"
    results = []
    lowers = LambdaCallback(on_train_start=lambda trainer, _: trainer.optimizers[0].param_groups[0].update(lr=0.01))
    for start, callbacks in ((path, [lowers, saves(again, "on_train_start")]), (again, [])):
        trainer, module = setting.trainer(max_epochs=2, callbacks=callbacks), Momentum()
        trainer.fit(module, loader(), loader(), ckpt_path=start)
        results.append(found(trainer, module))
    return results


def saving_without_a_batch(setting: Setting) -> Any:
    path, again = saved(setting), setting.folder / "again.ckpt"
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(Momentum(), loader(), loader(), ckpt_path=path)  # the fit has ended already: no batch runs
    trainer.save_checkpoint(again)
    trainer, module = setting.trainer(max_epochs=2), Momentum()
    trainer.fit(module, loader(), loader(), ckpt_path=again)
    return found(trainer, module)


CASES = {
    case.__name__: case
    for case in (
        objects,
        state_from_hooks,
        state_from_hooks_of_other_runs,
        changes_trainer,
        unknown_evaluation,
        unknown_evaluation_that_reads_elsewhere,
        known_evaluation_that_reads_elsewhere,
        unknown_evaluation_of_parameters_in_shards,
        resuming,
        saving_without_a_batch,
    )
}


def run_all(payload: dict[str, Any]) -> dict[str, Any]:
    """Return each case's result, or its error."""
    results: dict[str, Any] = {}
    for name in payload["cases"]:
        pl.seed_everything(5, verbose=False)
        folder = Path(payload["folder"]) / name
        try:
            results[name] = CASES[name](Setting(folder, payload["holmes"]))
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            if payload["holmes"]:
                return results  # ranks may be out of step
    return results


STAGED = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of plain Lightning, of the strategy on one process, and of two stages of two replicas."""

    cases = chosen(request, "name")

    def payload(holmes: Any) -> dict[str, Any]:
        return {"folder": str(tmp_path_factory.mktemp("steps")), "holmes": holmes, "cases": cases}

    staged = launch(4, "test_step_state:run_all", payload(STAGED), timeout_s=200)
    return {"plain": run_all(payload(None)), "alone": run_all(payload({})), "staged": staged}


@pytest.mark.xdist_group("hooks")
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_what_it_has_in_plain_lightning(name: str, results: Any) -> None:
    assert_alike(name, results["plain"], [*results["staged"], results["alone"]])
