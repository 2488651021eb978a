"""A sharded optimizer in whole fits: hooks that read and change values during a step, accumulation, fp32 master weights.

Baseline: plain Lightning in this process, same batches (each replica has all of them); for master weights a plain loop.
Tolerance: 1e-5 relative in fp32; 1e-2 for bf16 weights, one unit of their last place.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import forked_executable, launch
from quiet import quiet_trainer
from strategy_cases import Classifier, build, samples
from tanh_net import Unfreezes
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim import bucket_reducer


class AdamW(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Keeping(AdamW):
    """Gives each fit the same optimizer."""

    made: Any = None

    def configure_optimizers(self) -> Any:
        self.made = self.made or super().configure_optimizers()
        return self.made


class Reader(pl.Callback):
    """Reads parameters in two hooks, without announcing that to the strategy."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {"batch_end": [], "batch_start": []}
        self.under_way = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.sums["batch_start"].append(float(sum(p.detach().sum() for p in pl_module.parameters())))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.under_way += sum(type(p) is not torch.nn.Parameter for p in pl_module.parameters())
        self.sums["batch_end"].append(float(sum(p.detach().sum() for p in pl_module.parameters())))


class Changing(AdamW):
    """Changes gradients and parameters in hooks, with code of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.01, 0.02)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.5, 0.5)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    given = {"devices": int(os.environ.get("WORLD_SIZE", 1)), "max_epochs": 2, "use_distributed_sampler": False}
    return quiet_trainer(strategy, **(given | options))


def run_fit(
    strategy: Any, cls: type[AdamW], ckpt_path: Any = None, **options: Any
) -> tuple[dict[str, Tensor], pl.Trainer]:
    """Run one fit; every replica has the same batches, so that the mean over replicas is that of one process."""
    module = build(cls)
    made = trainer(strategy, **options)
    made.fit(module, DataLoader(samples(), 8), ckpt_path=ckpt_path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, made


def run_all(payload: Any) -> dict[str, Any]:
    """Run all fits, in two replicas, or in one plain process if ``payload`` is None."""
    warnings.filterwarnings("ignore")
    bucket_reducer.LEAST_BUCKET_BYTES = 300  # so that a small module has several buckets
    found: dict[str, Any] = {}

    def strategy(**options: Any) -> Any:
        holmes = {"pipeline_parallel_size": 1, "num_microbatches": 1, "sharding": "optimizer"}
        return "auto" if payload is None else HolmesStrategy(**(holmes | options))

    reader = Reader()
    found["read"], _ = run_fit(strategy(), AdamW, callbacks=[reader])
    found["sums"], found["under way"] = reader.sums, reader.under_way
    found["shares"], ran = run_fit(strategy(), AdamW)
    if payload is not None:
        found["plan"] = ran.strategy.plan
    found["changed"], _ = run_fit(strategy(), Changing)
    found["accumulated"], _ = run_fit(strategy(), AdamW, accumulate_grad_batches=2, gradient_clip_val=0.1)
    if payload is not None:
        for name, holmes, callbacks in (
            ("off", {"sharding": "auto"}, []),
            ("finetuning", {"sharding": "optimizer"}, [Unfreezes("head")]),
        ):
            made = strategy(**holmes)
            made.on_exception = lambda exception: None
            try:
                _, ran = run_fit(made, AdamW, callbacks=callbacks)
                found[name] = made.plan.sharding
            except UnsupportedModuleError as error:
                found[name] = str(error)
        _, ran = run_fit(strategy(), Keeping)
        (group,) = ran.optimizers[0].param_groups
        found["after"] = [id(p) for p in group["params"]] == [id(p) for p in ran.lightning_module.parameters()]
        try:
            trainer(strategy()).fit(ran.lightning_module, DataLoader(samples(), 8))
        except UnsupportedModuleError as error:
            found["used"] = str(error)
    return found


def run_masters(payload: Any) -> dict[str, Any]:
    """Train bf16 weights with fp32 master weights, in as many replicas as there are processes, and go on from a checkpoint of the third step;
    ``payload``: further arguments of HolmesStrategy, and where the checkpoint is to be."""
    warnings.filterwarnings("ignore")
    path, found = payload.pop("path"), {}

    class Noting(AdamW):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))
            if self.global_step == 3:
                self.trainer.save_checkpoint(path)

    os.environ["PYTHON_EXEC"] = payload.pop("python", sys.executable)  # the interpreter that runs optimizer nodes
    for source in (None, path):
        losses: list[float] = []
        holmes = HolmesStrategy(pipeline_parallel_size=1, num_microbatches=1, master_weights=True, **payload)
        weights, ran = run_fit(holmes, Noting, source, precision="bf16-true")
        masters = {n: state["master_weight"] for n, state in ran.strategy._fit.shards.each_state()}
        found["resumed" if source else "whole"] = {"weights": weights, "losses": losses, "masters": masters}
    return found


def run_written_masters(payload: Any) -> list[float]:
    """Train bf16 weights with masters, all of which a hook before the third step writes to; return by parameter how far that step moves them
    from what was written."""
    moved: list[float] = []

    class Writing(AdamW):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters() if self.global_step == 2 else ():
                parameter.data.fill_(0.5)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3 and not moved:
                moved.extend(float((parameter - 0.5).abs().max()) for parameter in self.parameters())

    holmes = HolmesStrategy(pipeline_parallel_size=1, num_microbatches=1, master_weights=True)
    run_fit(holmes, Writing, precision="bf16-true")
    return moved


pytestmark = pytest.mark.xdist_group("sharded_optimizer")


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return run_all(None), launch(2, "test_sharded_optimizer:run_all", {}, timeout_s=120)


@pytest.mark.parametrize("name", ["read", "shares", "changed", "accumulated"])
def test_weights_are_those_of_plain_lightning(name: str, runs: Any) -> None:
    plain, staged = runs
    for result in staged:
        torch.testing.assert_close(result[name], plain[name], rtol=1e-5, atol=1e-6)


def test_hooks_read_parameters_that_were_under_way(runs: Any) -> None:
    plain, staged = runs
    for result in staged:
        for place, sums in plain["sums"].items():
            assert result["sums"][place] == pytest.approx(sums, rel=1e-5), place
        assert result["under way"] > 0


def test_the_plan_says_what_is_sharded_and_how_gradients_are_summed(runs: Any) -> None:
    for result in runs[1]:
        assert result["plan"].sharding == "optimizer"
        assert result["plan"].collectives == ("p2p",), "gloo's reduce_scatter sends twice as much"


def test_auto_is_off_for_a_small_state_and_finetuning_callbacks_are_refused(runs: Any) -> None:
    for result in runs[1]:
        assert result["off"] == "none"
        assert 'sharding="optimizer": the callback Unfreezes' in result["finetuning"]


def test_after_a_fit_the_groups_are_whole_and_another_fit_with_this_optimizer_is_refused(runs: Any) -> None:
    for result in runs[1]:
        assert result["after"] and "this AdamW was trained with before" in result["used"]


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"sharding": "parameters"}),
        (1, {"optimizer_nodes": 1}),
        (2, {"optimizer_nodes": 1, "optimizer_states": "a folder"}),
    ],
    ids=str,
)
def test_master_weights_give_the_numbers_of_a_loop_that_rounds_fp32_weights_also_when_they_go_on(
    replicas: int, options: dict[str, Any], tmp_path: Path
) -> None:
    if "optimizer_nodes" in options:
        options = options | {"python": forked_executable()}
    if "optimizer_states" in options:
        options = options | {"optimizer_states": str(tmp_path)}
    options = options | {"path": str(tmp_path / "middle.ckpt")}
    results = launch(replicas, "test_sharded_optimizer:run_masters", options, timeout_s=100)
    module = build(AdamW).bfloat16()
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), 0.05)
    losses = []
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for _ in range(2):
        for batch in DataLoader(samples(), 8):
            module.zero_grad()
            batch = [t.bfloat16() if t.is_floating_point() else t for t in batch]
            with torch.autocast("cpu", enabled=False):
                loss = module.training_step(batch, 0)
            losses.append(float(loss))
            loss.backward()
            for name, parameter in module.named_parameters():
                masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            for name, parameter in module.named_parameters():
                parameter.data.copy_(masters[name].detach())
    for result, resumed in ((each["whole"], each["resumed"]) for each in results):
        assert resumed["losses"] == result["losses"][3:]
        torch.testing.assert_close(resumed["masters"], result["masters"], rtol=0, atol=0)
        assert result["losses"] == pytest.approx(losses, rel=2e-2)
        for name, value in result["weights"].items():
            torch.testing.assert_close(value.float(), masters[name].detach(), rtol=1e-2, atol=2e-3)
        assert result["masters"].keys() == masters.keys()
        for name, value in result["masters"].items():
            assert not torch.equal(value, value.bfloat16().float()), "rounded"
            torch.testing.assert_close(value, masters[name].detach(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_masters_take_over_what_a_hook_before_the_step_writes(replicas: int) -> None:
    for moved in launch(replicas, "test_sharded_optimizer:run_written_masters", timeout_s=100):
        assert moved and all(0.0 <= distance < 0.1 for distance in moved), "the weights before were random"
