"""Runs with optimizer nodes in which some parameters are trained later than others: with a GradScaler, resumed from a
checkpoint, and in a job that is started again.

Everything is compared with plain Lightning in one process on the same samples; see test_later_groups.py.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from comparing import state_of
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from optimizer_node_cases import Data, make_trainer, states_in, with_nodes
from sharded_parameter_cases import Thawing, Tied

from lightning_holmes import HolmesStrategy


class Overflows(pl.Callback):
    """Makes the gradients of the given batches (counted over all epochs) overflow; records the scale after each batch."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.scales = batches, list[float]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx in self.batches:
            trainer.precision_plugin.scaler.update(2.0**40)  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


SCALED: dict[str, tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "at the step": (1, (3,), {}, {"gradient_clip_val": 0.2}),
    "in a pipeline's window": (2, (1, 3), {"pipeline": 2}, {"accumulate_grad_batches": 2}),
}
"""By when a layer thaws: the number of nodes, the batches that overflow, options of the strategy and of the trainer."""


def run_scaled(folder: Path, size: int | None = None) -> dict[str, Any]:
    """Return weights, states of a checkpoint, and loss scales of three epochs in 16-mixed precision. ``size``: the number of
    optimizer nodes and of pipeline ranks; None for plain Lightning."""
    found = {}
    for number, (name, (nodes, batches, options, of_trainer)) in enumerate(SCALED.items()):
        if size not in (None, nodes):
            continue
        torch.manual_seed(7)
        module = Thawing("sgd")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, backoff_factor=2.0**-30, growth_interval=3)
        overflows = Overflows(*batches)
        trainer = make_trainer(
            folder,
            3,
            strategy=None if size is None else with_nodes(size, 1, **options),
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            callbacks=[overflows],
            **of_trainer,
        )
        trainer.fit(module, datamodule=Data())
        file = folder / f"scaled-{number}-{size}.ckpt"
        trainer.save_checkpoint(file)
        found[name] = {
            "weights": state_of(module),
            "states": states_in(file) if trainer.global_rank == 0 else {},
            "scales": overflows.scales,
        }
    return found


class Thaws(pl.Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.layers[1].requires_grad_(trainer.current_epoch > 0)


class Saves(pl.Callback):
    """Saves a checkpoint in the middle of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.save_checkpoint(self.path)


WHEN = {"early": 3, "after": 4}
"""By when a checkpoint of a run of two epochs was written: the number of epochs up to which it is resumed."""
Make = Callable[[Path], HolmesStrategy | None]
SOURCES: dict[str, Make] = {
    "plain": lambda folder: None,
    "file": lambda folder: with_nodes(1),
    "folder": lambda folder: with_nodes(1, save_distributed_checkpoint=True),
}
TARGETS: dict[str, Make] = {
    "plain": lambda folder: None,
    "disk": lambda folder: with_nodes(1, optimizer_states=str(folder / "states")),
    "a stage's node each": lambda folder: with_nodes(2, pipeline=2),
    "no node": lambda folder: HolmesStrategy(
        pipeline_parallel_size=1, num_microbatches=2, save_distributed_checkpoint=False
    ),
}
RESUMED = {"plain": ("disk",), "file": ("no node", "plain"), "folder": ("a stage's node each",)}
"""By source of the checkpoint, the layouts in which it is resumed."""


def build() -> Tied:
    torch.manual_seed(7)
    return Tied("adamw")


def save_all(folder: Path, source: str) -> None:
    """Write checkpoints of a run of two epochs in which a layer thaws."""
    saves = Saves(folder / f"{source}-early.ckpt")
    trainer = make_trainer(folder, 2, strategy=SOURCES[source](folder), callbacks=[Thaws(), saves])
    trainer.fit(build(), datamodule=Data())
    trainer.save_checkpoint(folder / f"{source}-after.ckpt")


def resume_all(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Return weights and states by when the checkpoint was saved."""
    found: dict[str, Any] = {}
    for when, epochs in WHEN.items():
        module = build()
        trainer = make_trainer(folder, epochs, strategy=TARGETS[target](folder), callbacks=[Thaws()])
        trainer.fit(module, datamodule=Data(), ckpt_path=folder / f"{source}-{when}.ckpt")
        file = folder / f"{source}-to-{target}.ckpt"
        trainer.save_checkpoint(file)
        states = states_in(file) if trainer.global_rank == 0 else {}
        found[when] = {"weights": state_of(module), "states": states}
    return found


def work(payload: tuple[str, str]) -> dict[str, Any]:
    """Run the fits with a GradScaler and, on two workers, the resumed ones; plain Lightning's checkpoints lie in the folder.
    Runs in each process."""
    folder, os.environ["PYTHON_EXEC"] = Path(payload[0]), payload[1]
    size = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {"scaled": run_scaled(folder, size)}
    if size == 2:
        for source, targets in RESUMED.items():
            if source != "plain":
                save_all(folder, source)
            found |= {
                f"{source} to {target}": resume_all(folder, source, target) for target in targets if target != "plain"
            }
    return found
