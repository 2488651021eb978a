"""What a step may ask for as a whole equals plain Lightning's where the step runs whole; where it is split, it is refused with
a remedy.

Baselines: plain Lightning in one process, and DDP in two; parameters and logs to 1e-6.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from launch import launch
from lightning.pytorch.loggers import CSVLogger
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy


class Stack(TanhNet):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class ReadsLogDir(Stack):
    """Logs the length of the log folder's name that each step reads."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("seen", float(len(str(self.trainer.log_dir))))
        return loss


class KeepsLogDir(Stack):
    def setup(self, stage: str) -> None:
        self.folder = self.trainer.log_dir

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("seen", float(len(str(self.folder))))
        return loss


class Computes(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean.compute(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.log("val", self.mean.compute())


class LogsMetric(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Gathers(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        every = self.all_gather(batch[0].mean() * loss, sync_grads=True)
        self.log("gathered", every.detach().sum())
        return loss + every.square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("at the end", float(self.all_gather(torch.tensor(1.0)).sum()))


class Skips(Stack):
    """Skips the second batch of an accumulation window, a whole window, and one batch before the last."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx in (1, 4, 5, 6) else loss


class SkipsOneMicrobatch(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch[0].sum() < 0 else loss


MODULES = {c.__name__: c for c in (ReadsLogDir, KeepsLogDir, Computes, LogsMetric, Gathers, Skips, SkipsOneMicrobatch)}


def run(name: str, strategy: Any, folder: Path, *, logger: bool = False, **options: Any) -> Any:
    """Return the final parameters and the logged values, or the error."""
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = torch.randn(32, 4)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = quiet_trainer(
        strategy if isinstance(strategy, str) else HolmesStrategy(**strategy, timeout=timedelta(seconds=60)),
        devices=devices,
        max_epochs=1,
        logger=CSVLogger(folder) if logger else False,
        default_root_dir=folder,
        **options,
    )
    data = DataLoader(TensorDataset(inputs), batch_size=4)
    try:
        trainer.fit(module, data, data if "validation_step" in vars(type(module)) else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value.detach().clone() for key, value in module.state_dict().items()}, logged


def on_each_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """Return each run of the payload, by its name."""
    folder = Path(payload["folder"])
    return {key: run(name, strategy, folder, **more) for key, (name, strategy, more) in payload["runs"].items()}


KEEP = "ask once, in setup(), as self.folder = self.trainer.log_dir"


def assert_equal(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.mark.parametrize("name", ["ReadsLogDir", "KeepsLogDir", "Computes", "LogsMetric", "Gathers", "Skips"])
def test_one_process_is_plain_lightning(name: str, tmp_path: Path) -> None:
    plain = run(name, "auto", tmp_path, logger=name == "ReadsLogDir")
    assert_equal(run(name, {}, tmp_path, logger=name == "ReadsLogDir"), plain)


@pytest.mark.parametrize(
    "holmes", [{}, {"num_microbatches": 2}, {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 2}]
)
def test_a_batch_that_is_skipped_leaves_what_was_gathered_to_the_optimizer(holmes: Any, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_equal(run("Skips", holmes, tmp_path, **options), run("Skips", "auto", tmp_path, **options))
    assert_equal(run("Skips", holmes, tmp_path), run("Skips", "auto", tmp_path))


def test_a_batch_of_which_one_microbatch_is_skipped_is_refused(tmp_path: Path) -> None:
    said = run("SkipsOneMicrobatch", {"num_microbatches": 4}, tmp_path)
    assert "returned NoneType without a loss tensor" in said


def test_a_metric_computed_in_a_step_needs_one_microbatch(tmp_path: Path) -> None:
    said = run("Computes", {"num_microbatches": 2}, tmp_path)
    assert "Computes.training_step calls self.mean.compute()" in said and "self.log(..., self.mean)" in said
    said = run("Computes", {"eval_num_microbatches": 2}, tmp_path)
    assert "Computes.validation_step calls self.mean.compute()" in said


ON_TWO = {
    # one stage, two replicas; "..." is DDP
    "log_dir": ("ReadsLogDir", {}, {"logger": True}),
    "log_dir ...": ("ReadsLogDir", "ddp", {"logger": True}),
    "log_dir in microbatches": ("ReadsLogDir", {"num_microbatches": 2}, {}),
    "compute": ("Computes", {}, {}),
    "compute ...": ("Computes", "ddp", {}),
    "gather": ("Gathers", {}, {}),
    "gather sharded": ("Gathers", {"sharding": "optimizer"}, {}),
    "gather ...": ("Gathers", "ddp", {}),
    "gather in microbatches": ("Gathers", {"num_microbatches": 2}, {}),
    "skip": ("Skips", {}, {}),
    # two stages
    "stages log_dir": ("ReadsLogDir", {"pipeline_parallel_size": 2}, {}),
    "stages log_dir of a logger": ("ReadsLogDir", {"pipeline_parallel_size": 2}, {"logger": True}),
    "stages log_dir kept": ("KeepsLogDir", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages compute": ("Computes", {"pipeline_parallel_size": 2}, {}),
    "stages compute in microbatches": ("Computes", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages metric": ("LogsMetric", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages gather": ("Gathers", {"pipeline_parallel_size": 2}, {}),
}
PLAIN = {"stages log_dir kept": "KeepsLogDir", "stages compute": "Computes", "stages metric": "LogsMetric"}
REFUSED = {
    "log_dir in microbatches": KEEP,
    "gather in microbatches": "num_microbatches=1",
    "skip": "without a loss tensor",
    "stages log_dir": KEEP,
    "stages log_dir of a logger": KEEP,
    "stages compute in microbatches": "self.log(..., self.mean)",
    "stages gather": "calls self.all_gather",
}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("two"))
    return launch(2, "test_whole_steps:on_each_rank", {"runs": ON_TWO, "folder": folder}, timeout_s=200)


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", [name for name in ON_TWO if f"{name.removesuffix(' sharded')} ..." in ON_TWO])
def test_replicas_of_a_whole_step_are_ddp(name: str, on_two: Any) -> None:
    for found in on_two:
        assert_equal(found[name], found[f"{name.removesuffix(' sharded')} ..."])


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", PLAIN)
def test_stages_give_the_numbers_of_plain_lightning(name: str, on_two: Any, tmp_path: Path) -> None:
    plain = run(PLAIN[name], "auto", tmp_path)
    for state, logged in (found[name] for found in on_two):
        torch.testing.assert_close(state, plain[0], rtol=1e-6, atol=1e-6)
        assert logged.keys() == plain[1].keys()
        if "seen" not in logged:  # "seen" is the length of a folder's name
            assert logged == pytest.approx(plain[1], rel=1e-6)


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", REFUSED)
def test_a_part_of_a_step_is_refused_with_the_cure_on_every_rank(name: str, on_two: Any) -> None:
    for found in on_two:
        assert isinstance(found[name], str) and REFUSED[name] in found[name], found[name]
