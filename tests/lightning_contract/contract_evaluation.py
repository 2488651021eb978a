"""Several loaders in validation, test and prediction, and callbacks that write predictions."""

from typing import Any

import lightning.pytorch as pl
import torch
from contract import Run, each
from contract_models import Net, batches, indices
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities import CombinedLoader


class Several(Net):
    """A module whose steps take a dataloader_idx."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch) + 10 * dataloader_idx


class Places(Callback):
    """Records which batch of which loader comes."""

    def __init__(self) -> None:
        self.places: list[Any] = []

    def note(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.places.append((dataloader_idx, batch_idx, indices(batch)[0]))

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = note


@each(validate="validate", test="test", predict="predict")
def case_loaders_come_one_after_the_other(run: Run, entry: str):
    places = Places()
    getattr(run.trainer(callbacks=[places]), entry)(Several(), [batches(2), batches(1, 50)])
    assert places.places == [(0, 0, 0), (0, 1, 2), (1, 0, 50)]


@each(validate="val_loss", test="test_loss")
def case_each_loader_has_results_of_its_own(run: Run, name: str):
    entry = "validate" if name == "val_loss" else "test"
    results = getattr(run.trainer(), entry)(Several(), [batches(2), batches(1, 50)], verbose=False)
    assert [list(result) for result in results] == [[f"{name}/dataloader_idx_0"], [f"{name}/dataloader_idx_1"]]
    return results


def case_names_may_be_without_the_loader_s(run: Run):
    class Bare(Several):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"loss_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    results = run.trainer().validate(Bare(), [batches(1), batches(1)], verbose=False)
    assert [list(result) for result in results] == [["loss_0"], ["loss_1"]]


def case_limits_hold_for_each_loader(run: Run):
    trainer = run.trainer(limit_test_batches=0.5)
    places = Places()
    trainer.callbacks.append(places)
    trainer.test(Several(), [batches(4), batches(2, 50)], verbose=False)
    assert places.places == [(0, 0, 0), (0, 1, 2), (1, 0, 50)]
    assert trainer.num_test_batches == [2, 1]


def case_loaders_may_come_side_by_side(run: Run):
    class Pairs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(torch.cat(batch)))

    results = run.trainer().validate(Pairs(), CombinedLoader([batches(2), batches(1, 50)], "min_size"), verbose=False)
    assert list(results[0]) == ["val_loss"]
    return results


def case_a_prediction_may_be_anything(run: Run):
    class Anything(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"out": self(batch), "names": ["a", "b"], "index": batch_idx}

    found = run.trainer().predict(Anything(), batches(2))
    assert [sorted(part) for part in found] == [["index", "names", "out"]] * 2
    assert [part["index"] for part in found] == [0, 1]
    return found


def case_without_a_predict_step_the_forward_predicts(run: Run):
    class Forward(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Net().layers

        def forward(self, batch: Any) -> Any:
            return Net.forward(self, batch)  # type: ignore[arg-type]

    module = Forward()
    found = run.trainer().predict(module, batches(1))
    torch.testing.assert_close(found[0], module(next(iter(batches(1)))).detach())


class Writes(BasePredictionWriter):
    """Records the predictions that it is given, and when."""

    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((batch_idx, loader, list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


@each(batch=("batch", 3, 0), epoch=("epoch", 0, 1), both=("batch_and_epoch", 3, 1))
def case_a_writer_is_given_predictions(run: Run, value: Any):
    interval, times, epochs = value
    writer = Writes(interval)
    trainer = run.trainer(callbacks=[writer])
    trainer.predict(Net(), batches(3), return_predictions=False)
    is_first = trainer.global_rank == 0  # each row is written once
    assert (len(writer.batches), len(writer.epochs)) == ((times, epochs) if is_first else (0, 0))
    return trainer.strategy.broadcast((writer.batches, writer.epochs))
