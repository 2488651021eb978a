"""A sharded optimizer in whole fits: hooks that read and change values during a step, accumulation, fp32 master weights.

Baseline: plain Lightning in this process, same batches (each replica has all of them); for master weights a plain loop.
Tolerance: 1e-5 relative in fp32; 1e-2 for bf16 weights, one unit of their last place.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import forked_executable, launch
from sharded_cases import AdamW, run_all
from strategy_cases import build, samples
from torch.utils.data import DataLoader

pytestmark = pytest.mark.xdist_group("sharded_optimizer")


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return run_all(None), launch(2, "sharded_cases:run_all", {}, timeout_s=120)


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
        assert result["off"] == len(list(build(AdamW).parameters()))
        assert 'sharding="optimizer": the callback Unfreezing' in result["finetuning"]


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
def test_master_weights_give_the_numbers_of_a_loop_that_rounds_fp32_weights(
    replicas: int, options: dict[str, Any], tmp_path: Path
) -> None:
    if "optimizer_nodes" in options:
        options = options | {"python": forked_executable()}
    if "optimizer_states" in options:
        options = options | {"optimizer_states": str(tmp_path)}
    results = launch(replicas, "sharded_cases:run_masters", options, timeout_s=100)
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
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=2e-2)
        for name, value in result["weights"].items():
            torch.testing.assert_close(value.float(), masters[name].detach(), rtol=1e-2, atol=2e-3)
        assert result["masters"].keys() == masters.keys()
        for name, value in result["masters"].items():
            assert not torch.equal(value, value.bfloat16().float()), "rounded"
            torch.testing.assert_close(value, masters[name].detach(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_masters_take_over_what_a_hook_before_the_step_writes(replicas: int) -> None:
    for moved in launch(replicas, "sharded_cases:run_written_masters", timeout_s=100):
        assert moved and all(0.0 <= distance < 0.1 for distance in moved), "the weights before were random"
