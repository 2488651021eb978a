"""What lies between a strategy's runs: what can be asked of an ended fit, and what a set-up that failed leaves behind."""

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from launch import launch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import read_state_dict
from lightning_holmes.checkpoint.finding import is_folder
from lightning_holmes.commands.convert import main as convert
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.run import Run


class Stack(TanhNet):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Broken(Stack):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        raise RuntimeError("planned failure")


def make_trainer(strategy: HolmesStrategy, **options: Any) -> pl.Trainer:
    return quiet_trainer(strategy, **({"devices": 1, "max_epochs": 1} | options))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)


def saved(trainer: pl.Trainer, path: Path) -> dict[str, Any]:
    trainer.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
    return checkpoint


def test_an_ended_fit_is_saved_also_after_an_evaluation(tmp_path: Path) -> None:
    strategy = HolmesStrategy()
    trainer, module = make_trainer(strategy), Stack()
    with pytest.raises(HolmesError, match="the plan is made when the first batch comes"):
        _ = strategy.plan
    trainer.fit(module, loader())
    once = saved(trainer, tmp_path / "fit.ckpt")
    plan = strategy.plan
    trainer.validate(module, loader(), verbose=False)
    again = saved(trainer, tmp_path / "validate.ckpt")
    assert strategy.plan.partition == plan.partition
    assert len(once["optimizer_states"][0]["state"]) == len(again["optimizer_states"][0]["state"]) == 8
    assert all(torch.equal(value, again["state_dict"][name]) for name, value in once["state_dict"].items())


def test_a_module_that_was_never_run_is_saved_as_a_folder_where_one_is_asked_for(tmp_path: Path) -> None:
    trainer, module = make_trainer(HolmesStrategy(save_distributed_checkpoint=True)), Stack()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    state = read_state_dict(tmp_path / "new.ckpt")
    assert is_folder(tmp_path / "new.ckpt") and list(state) == list(module.state_dict())


def test_a_set_up_that_fails_half_way_is_undone_and_the_next_run_is_a_whole_one() -> None:
    strategy = HolmesStrategy()
    trainer, module = make_trainer(strategy), Broken()
    with pytest.raises(RuntimeError, match="planned failure"):
        trainer.fit(module, loader())
    assert not any("forward" in vars(layer) for layer in module.layers)
    again = Stack()
    trainer.fit(again, loader())
    assert trainer.global_step == 4 and strategy.plan.num_stages == 1


def test_a_trainer_that_counts_other_processes_than_were_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"KUBERNETES_PORT": "tcp://127.0.0.1:443", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in (variables | {"WORLD_SIZE": "2", "RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(HolmesStrategy(), plugins=[KubeflowEnvironment()])
    with pytest.raises(ConfigurationError, match=r"2 processes were started, but Trainer\(num_nodes=1, devices=1\)"):
        trainer.fit(Stack(), loader())


def copies(_: Any) -> tuple[list[int], int]:
    """Return on each rank the steps of copies of a trainer that is new, has trained and has failed, and the number of process
    groups with this rank alone."""
    steps, size = [], int(os.environ["WORLD_SIZE"])
    for state in ("new", "has trained", "has failed"):
        trainer = make_trainer(HolmesStrategy(pipeline_parallel_size=size), devices=size)
        if state == "has trained":
            trainer.fit(Stack(), loader())
        if state == "has failed":
            with pytest.raises(RuntimeError, match="planned failure"):
                trainer.fit(Broken(), loader())
        for again in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            assert type(again.strategy) is HolmesStrategy and again.strategy is not trainer.strategy
            again.fit(Stack(), loader())
            steps.append(again.global_step)
    return steps, sum(group.size() == 1 for group in dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_is_copied_and_pickled(world_size: int) -> None:
    """Also: each rank has at most one group of its own, however many runs there were, since each group keeps threads."""
    assert launch(world_size, "test_runs:copies") == [([4] * 6, int(world_size > 1))] * world_size


def left_by_fits(_: Any) -> list[tuple[int, list[str]]]:
    """Return after each of two fits, once the trainer is freed, the number of gloo threads, and the strategy, job and run
    objects that are left."""
    found = []
    for _ in range(2):
        make_trainer(HolmesStrategy(), devices=2).fit(Stack(), loader())
        gc.collect()
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        left = [type(o).__name__ for o in gc.get_objects() if isinstance(o, (HolmesStrategy, Job, Run))]
        found.append((sum("gloo" in name for name in names), left))
    return found


def test_nothing_holds_what_a_fit_was_made_of() -> None:
    """The process groups keep threads; a handler for the process's exit used to hold those of rank 0."""
    for first, second in launch(2, "test_runs:left_by_fits"):
        assert first == second and first[0] > 0 and first[1] == []


def test_a_checkpoint_without_optimizer_states_is_resumed_as_in_lightning(tmp_path: Path) -> None:
    trainer = make_trainer(HolmesStrategy())
    trainer.fit(Stack(), loader())
    checkpoint = saved(trainer, tmp_path / "whole.ckpt")
    torch.save(checkpoint | {"optimizer_states": []}, tmp_path / "without.ckpt")
    convert([str(tmp_path / "without.ckpt"), str(tmp_path / "folder.ckpt")])
    convert([str(tmp_path / "folder.ckpt"), str(tmp_path / "again.ckpt")])
    ends = []
    for strategy in ("auto", HolmesStrategy(), HolmesStrategy(), HolmesStrategy()):
        name = ["without", "without", "folder", "again"][len(ends)]
        torch.manual_seed(1)
        module = Stack()
        resumed = make_trainer(strategy, max_epochs=2)  # type: ignore[arg-type]
        torch.manual_seed(2)
        resumed.fit(module, loader(), ckpt_path=tmp_path / f"{name}.ckpt")
        ends.append(module.state_dict())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0])


def test_a_plan_lies_inside_of_a_checkpoint_and_is_taken_from_there(tmp_path: Path) -> None:
    trainer = make_trainer(
        HolmesStrategy(num_microbatches=2), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path / "kept")]
    )
    trainer.fit(Stack(), loader())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=0-step=4.ckpt"]
    (one,) = (tmp_path / "kept").iterdir()
    convert([str(one), str(tmp_path / "folder.ckpt")])
    convert([str(tmp_path / "folder.ckpt"), str(tmp_path / "again.ckpt")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.ckpt", "folder.ckpt", "kept"]
    for path in (one, tmp_path / "folder.ckpt", tmp_path / "again.ckpt"):
        again = make_trainer(HolmesStrategy(plan=str(path)), max_epochs=2)
        again.fit(Stack(), loader(), ckpt_path=path)
        assert isinstance(again.strategy, HolmesStrategy)
        assert again.global_step == 8 and again.strategy.plan.num_microbatches == 2
    torch.save({"state_dict": {}}, tmp_path / "none.ckpt")
    with pytest.raises(ConfigurationError, match="without a plan"):
        HolmesStrategy(plan=str(tmp_path / "none.ckpt"))


class NoLoss(Stack):
    """A step whose loss cannot be trained, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.requires_grad_(kind != "frozen")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            return loss
        return {"vector": loss.expand(3), "detached": loss.detach()}.get(self.kind, loss)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vector", r"training_step returned a loss of shape \(3,\): a loss is one number"),
        ("detached", "the loss that training_step returned needs no gradient"),
        ("frozen", r"needs no gradient: all parameters .* are frozen"),
        ("empty", "a batch without samples cannot be split into num_microbatches=2"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused_as_in_plain_lightning(kind: str, words: str) -> None:
    batches = [[torch.randn(0 if kind == "empty" and n == 2 else 4, 4)] for n in range(4)]
    data: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(HolmesError, match=words):
        make_trainer(HolmesStrategy(num_microbatches=2)).fit(NoLoss(kind), data)
    if kind != "empty":  # an empty batch is not split in plain Lightning, which takes the mean of nothing
        with pytest.raises(RuntimeError):
            make_trainer("auto").fit(NoLoss(kind), data)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_impossible_weights_of_microbatches_are_named(weight: float) -> None:
    class Weighted(Stack):
        def microbatch_weight(self, batch: list[Tensor]) -> float:
            return weight

    with pytest.raises(ConfigurationError, match=r"Weighted\.microbatch_weight gave"):
        make_trainer(HolmesStrategy(num_microbatches=2)).fit(Weighted(), loader())


def test_a_modules_own_parts_are_counted_and_few_samples_make_fewer() -> None:
    class Own(Stack):
        def split_batch(self, batch: list[Tensor], count: int) -> list[list[Tensor]]:
            return [[batch[0][:1]], [batch[0][1:]]]

        def microbatch_weight(self, batch: list[Tensor]) -> float:
            return float(len(batch[0]))

    with pytest.raises(ConfigurationError, match="split_batch returned 2 parts of a batch, not 3"):
        make_trainer(HolmesStrategy(num_microbatches=3)).fit(Own(), loader())
    trainer = make_trainer(HolmesStrategy(num_microbatches=4))
    trainer.fit(Stack(), DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=4))
    assert trainer.global_step == 3, "the last batch has two samples"
