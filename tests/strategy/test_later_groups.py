"""Parameters that are trained later than others: with optimizer nodes and a GradScaler, resumed from a checkpoint, and in a
job that is started again.

Baseline: plain Lightning in one process; for a job that is started again, the same job without faults. Tolerance 1e-5 (fp32
and 16-mixed) of the largest entry; a job that is started again is equal bit for bit.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import assert_same, state_of
from launch import forked_executable, launch, launch_raw
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from optimizer_node_cases import Data, make_trainer, states_in, with_nodes
from quiet import saves
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
    """Write checkpoints of a run of two epochs of four batches in which a layer thaws."""
    early = saves(folder / f"{source}-early.ckpt", "on_train_batch_end", lambda trainer: trainer.global_step == 6)
    trainer = make_trainer(folder, 2, strategy=SOURCES[source](folder), callbacks=[Thaws(), early])
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


pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("later_groups")]
Records = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("later")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """Results of plain Lightning: in 16-mixed precision, and resumed from its own checkpoints."""
    save_all(folder, "plain")
    return {"scaled": run_scaled(folder), "resumed": resume_all(folder, "plain", "plain")}


@pytest.fixture(scope="module")
def found(folder: Path, plain: dict[str, Any]) -> Records:
    """Results of each rank by name, of one worker and of two."""
    of_one, *of_two = (
        rank
        for size in (1, 2)
        for rank in launch(size, f"{work.__module__}:work", (str(folder), forked_executable()), timeout_s=240)
    )
    resumed = {name: [rank[name] for rank in of_two] for name in of_two[0] if name != "scaled"}
    by_ranks = {name: [rank["scaled"][name] for rank in of_two] for name in of_two[0]["scaled"]}
    return resumed | {name: [fit] for name, fit in of_one["scaled"].items()} | by_ranks


@pytest.mark.parametrize("name", SCALED)
def test_what_is_trained_later_in_16_bits_is_stepped_and_left_out_as_by_plain_lightning(
    name: str, plain: dict[str, Any], found: Records
) -> None:
    expected, ranks = plain["scaled"][name], found[name]
    batches = SCALED[name][1]
    assert all(expected["scales"][batch] < 2.0**40 for batch in batches), "these steps are left out"
    assert all(rank["scales"] == expected["scales"] for rank in ranks)
    for rank in ranks:
        assert_same(rank["weights"], expected["weights"])
    assert_same(ranks[0]["states"], expected["states"])


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("source", "target"), [(source, target) for source in RESUMED for target in RESUMED[source]])
def test_a_checkpoint_after_it_is_resumed_as_by_plain_lightning(
    source: str, target: str, when: str, folder: Path, plain: dict[str, Any], found: Records
) -> None:
    if target == "plain" and f"{source} to plain" not in found:
        found[f"{source} to plain"] = [resume_all(folder, source, target)]
    expected, ranks = plain["resumed"][when], found[f"{source} to {target}"]
    for rank in ranks:
        assert_same(rank[when]["weights"], expected["weights"])
    assert_same(ranks[0][when]["states"], expected["states"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "node": {"optimizer_nodes": 1, "pipeline_parallel_size": 1, "num_chunks": 4},
    "disk": {"optimizer_nodes": 1, "pipeline_parallel_size": 1, "num_chunks": 4},
    "shards": {"sharding": "parameters", "num_chunks": 4},
}
MEASURED = {"schedule": "auto", "gradient_sync": "auto"}


@pytest.mark.parametrize(("layout", "later"), [("node", "thawed once"), ("disk", "frozen"), ("shards", "a group")])
def test_a_job_that_is_started_again_goes_on_with_it(
    layout: str, later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job resumes in mid-epoch, so no hook thaws or adds anything again."""
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())
    strategy = LAYOUTS[layout] | MEASURED
    whole = {"folder": str(tmp_path), "name": "whole", "strategy": strategy, "later": later, "clip": 0.05}
    expected = launch(2, "snapshot_cases:train", whole)
    memory = str(tmp_path / "memory")
    on_disk = {"optimizer_states": str(tmp_path / "states")} if layout == "disk" else {}
    options = whole | {"strategy": strategy | {"snapshot_every_n_steps": 6} | on_disk, "snapshots": memory}
    kill = {"kill": {"rank": 1, "step": 10, "memory": memory}}
    for name, more, codes in (("killed", kill, [1, -9]), ("again", {}, [0, 0])):
        place = tmp_path / name
        started = options | {"name": name} | more
        workers = launch_raw(2, "snapshot_cases:train", started, timeout_s=60, folder=place)
        said = "\n".join(worker.output for worker in workers)
        assert [worker.exit_code for worker in workers] == codes, said
    assert "goes on from the snapshot of step 7: " in said, said
    assert [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(2)] == expected
