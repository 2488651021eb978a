"""ModelCheckpoint: when it saves, under which names, what it keeps and removes, and what it reports as the best."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from contract import PLAIN, TWO, Run, each
from contract_models import Net, batches
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint


class Levels(Net):
    """Logs the given values as "level" in validation, one an epoch."""

    def __init__(self, *levels: float) -> None:
        super().__init__()
        self.levels = levels or (3.0, 1.0, 2.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("level", self.levels[self.current_epoch % len(self.levels)])


def saved(run: Run, options: dict[str, Any], module: Any = None, **trainer: Any) -> tuple[ModelCheckpoint, list[str]]:
    """Fit with two batches an epoch; return the checkpoint callback and the names of the files that it left."""
    checkpoint = ModelCheckpoint(run.folder / "kept", **options)
    trainer = {"max_epochs": 4} | trainer
    run.fit(module or Levels(), batches(2), batches(1), callbacks=[checkpoint], **trainer)
    return checkpoint, sorted(Path(name).stem for name in run.files("kept/*.ckpt"))


@each(
    the_last_epoch=({}, ["epoch=3-step=8"]),
    the_best=({"monitor": "level"}, ["epoch=1-step=4"]),
    the_worst=({"monitor": "level", "mode": "max"}, ["epoch=3-step=8"]),
    the_best_two=({"monitor": "level", "save_top_k": 2}, ["epoch=1-step=4", "epoch=2-step=6"]),
    all_epochs=({"save_top_k": -1}, ["epoch=0-step=2", "epoch=1-step=4", "epoch=2-step=6", "epoch=3-step=8"]),
    nothing=({"save_top_k": 0}, []),
    each_second_epoch=({"save_top_k": -1, "every_n_epochs": 2}, ["epoch=1-step=4", "epoch=3-step=8"]),
    each_third_step=({"save_top_k": -1, "every_n_train_steps": 3}, ["epoch=1-step=3", "epoch=2-step=6"]),
    each_moment=(
        {"save_top_k": -1, "train_time_interval": timedelta(microseconds=1), "filename": "{step}"},
        [f"step={step}" for step in range(1, 9)],
    ),
    the_last_too=({"monitor": "level", "save_last": True}, ["epoch=1-step=4", "last"]),
    a_link_to_the_last=({"monitor": "level", "save_last": "link"}, ["epoch=1-step=4", "last"]),
    the_last_alone=({"save_top_k": 0, "save_last": True}, ["last"]),
    no_epoch=({"every_n_epochs": 0}, []),
)
def case_keeps(run: Run, value: Any):
    options, names = value
    assert saved(run, options)[1] == sorted(names)


@each(
    a_word=("word", "word"),
    the_epoch=("{epoch}", "epoch=1"),
    with_zeros=("{epoch:02d}-{step:03d}", "epoch=01-step=004"),
    with_a_metric=("at-{level:.1f}", "at-level=1.0"),
    with_an_unknown_metric=("{unknown:.1f}", "unknown=0.0"),
)
def case_names_by_its_template(run: Run, value: Any):
    template, name = value
    assert saved(run, {"monitor": "level", "filename": template})[1] == [name]


def case_names_may_hold_folders(run: Run):
    saved(run, {"filename": "at/{epoch}"}, max_epochs=1)
    assert run.files("kept/at/*.ckpt") == ["kept/at/epoch=0.ckpt"]


def case_knows_the_best(run: Run):
    checkpoint, _ = saved(run, {"monitor": "level", "save_top_k": 2})
    assert Path(checkpoint.best_model_path).name == "epoch=1-step=4.ckpt"
    assert float(checkpoint.best_model_score) == 1.0
    assert sorted(float(value) for value in checkpoint.best_k_models.values()) == [1.0, 2.0]
    assert Path(checkpoint.kth_best_model_path).name == "epoch=2-step=6.ckpt" and float(checkpoint.kth_value) == 2.0


def case_knows_the_last(run: Run):
    checkpoint, _ = saved(run, {"save_last": True})
    assert Path(checkpoint.last_model_path) == run.folder / "kept" / "last.ckpt"
    assert Path(checkpoint.best_model_path).name == "epoch=3-step=8.ckpt"
    assert checkpoint.best_model_score is None


def case_leaves_nothing_else(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept", save_top_k=2, monitor="level")
    strategy = run.strategy() if run.layout == PLAIN else run.strategy(save_distributed_checkpoint=False)
    run.fit(Levels(), batches(2), batches(1), callbacks=[checkpoint], max_epochs=4, strategy=strategy)
    assert run.files("kept/*") == ["kept/epoch=1-step=4.ckpt", "kept/epoch=2-step=6.ckpt"]


@each(without_a_logger=(False, "checkpoints"), with_a_logger=(True, "lightning_logs/version_0/checkpoints"))
def case_finds_its_folder(run: Run, value: Any):
    logger, folder = value
    trainer = run.fit(Net(), batches(1), logger=logger, enable_checkpointing=True)
    assert run.files(f"{folder}/*.ckpt") == [f"{folder}/epoch=0-step=1.ckpt"]
    assert Path(trainer.checkpoint_callback.dirpath) == run.folder / folder


def case_a_folder_that_is_not_empty_is_warned_about(run: Run):
    saved(run, {}, max_epochs=1)
    with run.warning("not empty"):
        saved(run, {}, max_epochs=1)


class Fails(Net):
    """Raises in a hook of the third batch, on every process."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("planned")


def case_saves_on_exception(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept", save_on_exception=True, filename="{step}")
    with pytest.raises(RuntimeError, match="planned"):
        run.fit(Fails(), callbacks=[checkpoint])
    found = run.files("kept/*")
    expected = [] if run.layout == TWO else ["kept/step=2.ckpt"]  # a stage that has failed cannot be asked for its part
    assert [name for name in found if name.endswith(".ckpt")] == expected


def case_an_exception_s_checkpoint_is_saved(run: Run):
    with pytest.raises(RuntimeError, match="planned"):
        run.fit(Fails(), callbacks=[OnExceptionCheckpoint(run.folder / "kept")])
    found = run.files("kept/*")
    # a stage that has failed cannot be asked for its part
    expected = [] if run.layout == TWO else ["kept/on_exception.ckpt"]
    assert [name for name in found if name.endswith(".ckpt")] == expected
