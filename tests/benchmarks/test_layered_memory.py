"""The memory that a worker needs for sharded parameters: peak resident memory of four processes that train a deep
module, and a model that they train within a limit that other strategies exceed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from layered_memory_workers import STATES
from memory_runs import run_within

pytestmark = pytest.mark.benchmark

WIDTH, RANKS, MORE_MB = 1024, 4, 60.0
LAYER_MB = 4 * WIDTH * WIDTH / 1e6


def test_a_worker_holds_its_share_and_two_layers(tmp_path: Path) -> None:
    """At most a quarter of the parameters, gradients and states, plus two layers and 60 MB, from before the module is
    built to the end of a fit with validation, a save to a folder and an evaluation afterwards."""
    payload = {"width": WIDTH, "depths": [24], "folder": str(tmp_path)}
    ranks = launch(RANKS, "layered_memory_workers:peaks", payload, timeout_s=280)
    everything = STATES * 24 * LAYER_MB
    for phase in ("fit", "save", "validate"):
        grown = [rank[24][phase] for rank in ranks]
        print(f"{phase}: {', '.join(f'{mb:.0f}' for mb in grown)} MB of {everything:.0f} MB")
        assert max(grown) <= everything / RANKS + 2 * LAYER_MB + MORE_MB


DEPTH = 72
LIMIT_MB = STATES * DEPTH * LAYER_MB / 3
LAYERED = {"sharding": "parameters", "num_microbatches": 2}
CONTROLS = {"DDP": "ddp", "two stages, two replicas": {"pipeline_parallel_size": 2, "num_microbatches": 2}}


def test_a_model_of_three_times_the_limit_trains_resumes_and_exports(tmp_path: Path) -> None:
    """Parameters, gradients and states need three times the memory that a worker's limit leaves above its imports.
    Baseline: the strategy on one process without a limit; losses and parameters to 1e-5."""

    def run(name: str, ranks: int, target: str = "train", limit_mb: float = LIMIT_MB, **payload: Any) -> list[Any]:
        settings = {"width": WIDTH, "depth": DEPTH, "strategy": LAYERED, "epochs": 2, "resume": None, "save": None}
        codes, _, found, log = run_within(limit_mb, ranks, target, tmp_path / name, **settings | payload)
        assert not any(codes), log
        print(f"{name}: {', '.join(str(round(each['grown'])) for each in found)} MB")
        return found

    half, whole, file, plain = (tmp_path / f"{name}.ckpt" for name in ("half", "whole", "file", "plain"))
    print(f"limit {LIMIT_MB:.0f} MB, needed {3 * LIMIT_MB:.0f} MB")
    expected = run("one process", 1, limit_mb=1e6, strategy={"num_microbatches": 2}, save=plain)
    first = run("trained", RANKS, epochs=1, save=half)
    second = run("resumed", RANKS, resume=half, save=whole)
    run("exported", 1, "export", source=whole, file=file)
    for one, other in zip(first, second, strict=True):
        assert one["losses"] + other["losses"] == pytest.approx(expected[0]["losses"], rel=1e-5)
    found, wanted = (torch.load(path, weights_only=True, mmap=True)["state_dict"] for path in (file, plain))
    assert found.keys() == wanted.keys() and len(found) == DEPTH
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("name", CONTROLS)
def test_other_ways_are_ended_by_that_limit(name: str, tmp_path: Path) -> None:
    """The kernel kills the processes that exceed the limit; the others end since their peers are gone."""
    settings = {"width": WIDTH, "depth": DEPTH, "epochs": 1, "resume": None, "save": None}
    codes, kills, _, _ = run_within(LIMIT_MB, RANKS, "train", tmp_path / "run", strategy=CONTROLS[name], **settings)
    print(f"{name}: exit codes {codes}, ended by the kernel {kills}")
    killed = [rank for rank in range(RANKS) if kills[rank]]
    assert killed and all(codes[rank] == -9 for rank in killed)
    assert all(codes)
