"""Loggers: what a Trainer passes to them, where they write, and what the Trainer says of them."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from contract import TWO, Run, each, refused
from contract_models import Lines, Net, batches
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


class WithSettings(Net):
    def __init__(self, size: int = 3, word: str = "one") -> None:
        super().__init__()
        self.save_hyperparameters()


def case_a_table_is_written(run: Run):
    logger = CSVLogger(run.folder, name="table")
    run.fit(WithSettings(), batches(3), batches(1), logger=logger)
    run.meet()
    with Path(run.folder, "table/version_0/metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert [row["step"] for row in rows if "loss" in row] == [0, 1, 2]
    assert sum("val_loss" in row for row in rows) == 1
    assert "size: 3" in Path(run.folder, "table/version_0/hparams.yaml").read_text()
    return rows


def case_events_are_written(run: Run):
    logger = TensorBoardLogger(run.folder, name="events")
    run.fit(WithSettings(), batches(2), logger=logger)
    assert len(run.files("events/version_0/events.out.tfevents.*")) == 1
    assert run.files("events/version_0/hparams.yaml")


def case_hooks_reach_the_logger(run: Run):
    class Uses(Net):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"mine": 5.0}, step=7)
            assert self.loggers == self.trainer.loggers

    lines = Lines()
    run.fit(Uses(), batches(1), logger=lines)
    assert (7, {"mine": 5.0}) in lines.lines


@each(success=False, failed=True)
def case_loggers_hear_how_it_ended(run: Run, fails: bool):
    class Ends(Net):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise RuntimeError("planned")

    lines = Lines()
    trainer = run.trainer(logger=lines)
    if fails:
        with pytest.raises(RuntimeError, match="planned"):
            trainer.fit(Ends(), batches(1))
    else:
        trainer.fit(Ends(), batches(1))
    assert lines.ended[-1] == ("failed" if fails else "success")


def case_checkpoints_are_told_to_loggers(run: Run):
    class Told(Lines):
        told = 0

        def after_save_checkpoint(self, checkpoint: Any) -> None:
            self.told += 1

    lines = Told()
    checkpoint = pl.callbacks.ModelCheckpoint(run.folder / "kept")
    run.fit(Net(), batches(1), logger=lines, callbacks=[checkpoint], max_epochs=2)
    assert lines.told == (2 if run.is_first else 0)


@refused("log_dir", TWO, only=["in_the_step"])
@each(in_a_hook="on_train_start", in_the_step="training_step")
def case_the_folder_of_a_logger_is_known(run: Run, where: str):
    class Reads(Net):
        found: Any = None

        def on_train_start(self) -> None:
            self.read("on_train_start")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.read("training_step")
            return super().training_step(batch, batch_idx)

        def read(self, here: str) -> None:
            if here == where:
                self.found = self.trainer.log_dir

    module = Reads()
    run.fit(module, batches(1), logger=CSVLogger(run.folder, name="table"))
    assert module.found == str(run.folder / "table/version_0")
