"""Optimizers, precisions and averages over stages: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches (one microbatch). Tolerance: 1e-5 relative in
fp32; 2e-3 with 16-bit floats, whose 10 mantissa bits round sums in another order.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from comparing import assert_alike, differences
from launch import chosen, launch
from optimizer_cases import CASES
from strategy_cases import run_cases

pytestmark = pytest.mark.xdist_group("optimizers")
TOLERANCE = {"loss_scaling": 2e-3}
# the schedule is given where there are replicas, so that no batch is spent on choosing one
STAGED = {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "1f1b"}
UNREFUSED = [name for name in CASES if name != "finetuning"]
IN_SHARDS = [name for name in UNREFUSED if name not in ("averages", "grad_norm")]
LAYOUTS: dict[str | None, tuple[int, dict[str, Any], list[str]]] = {
    "stages": (2, {"pipeline_parallel_size": 2, "num_microbatches": 1}, list(CASES)),
    "replicas": (4, STAGED | {"save_distributed_checkpoint": False}, ["averages", "grad_norm", "finetuning"]),
    "sharded optimizer": (4, STAGED | {"sharding": "optimizer"}, UNREFUSED),
    "shards": (2, {"sharding": "parameters", "num_microbatches": 1}, IN_SHARDS),
}
"""The number of processes, the strategy's arguments, and the cases that are not refused."""


@pytest.fixture(scope="module")
def runs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the results of a layout, and of plain Lightning for None, each of one run. Those of the averages
    and of the scaled losses are always asked for."""
    names = list(dict.fromkeys([*chosen(request, "name"), "averages", "loss_scaling"]))

    @cache
    def run(layout: str | None) -> Any:
        size, holmes, cases = LAYOUTS.get(layout, (1, None, names))
        payload = {"of": "optimizer_cases", "cases": [name for name in names if name in cases], "holmes": holmes}
        payload |= {"folder": str(tmp_path_factory.mktemp("runs")), "replicas": 1 if layout in (None, "stages") else 2}
        return launch(size, "strategy_cases:run_cases", payload, timeout_s=300) if layout else run_cases(payload)

    return run


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_numbers_of_plain_lightning(name: str, runs: Any) -> None:
    compare(name, runs(None), runs("stages"))


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in LAYOUTS if layout != "stages" for name in LAYOUTS[layout][2]]
)
def test_every_rank_of_every_replica_has_the_numbers_of_plain_lightning(layout: str, name: str, runs: Any) -> None:
    compare(name, runs(None), runs(layout))


def compare(name: str, plain: dict[str, Any], staged: list[dict[str, Any]]) -> None:
    """Compare every rank's results of a case with those of plain Lightning; torch's averages are of the rank's own parameters."""
    if name == "torchs_average" and not any("error" in results.get(name, "error") for results in staged):
        everything = plain[name]["local"]
        assert set().union(*(results[name]["local"] for results in staged)) == set(everything)
        for results in staged:
            results[name]["local"] = everything | results[name]["local"]
    assert_alike(name, plain, staged, relative=TOLERANCE.get(name, 1e-5))


def test_an_average_goes_on_where_it_stopped(runs: Any) -> None:
    for results in runs("stages"):
        for name in ("ema", "mean"):
            averages = results["averages"]
            assert not differences(averages[name]["weights"], averages[f"{name}_resumed"], relative=1e-5)


def test_an_overflow_is_skipped_by_all_stages(runs: Any) -> None:
    for result in (runs(None), *runs("stages")):
        assert result["loss_scaling"]["overflows"]["scale"] < 2.0**40


def test_an_anomaly_ends_all_ranks_and_names_the_operator(tmp_path: Path) -> None:
    first, last = launch(2, "optimizer_cases:anomaly", {"block": 3, "sharded": "auto"}, timeout_s=100)
    assert "SqrtBackward0" in last and "in the backward of stage 1, microbatch 0" in last
    assert "rank 1" in first and "SqrtBackward0" in first


def test_an_anomaly_of_the_first_stage_ends_all_replicas(tmp_path: Path) -> None:
    ended = launch(4, "optimizer_cases:anomaly", {"block": 0, "sharded": True}, timeout_s=100)
    assert all("SqrtBackward0" in reason for reason in ended), ended
    assert sum("in the backward of stage 0, microbatch 0" in reason for reason in ended) >= 1


@pytest.mark.parametrize("sharded", [False, True])
def test_an_infinite_gradient_ends_all_ranks_and_names_the_parameter(sharded: bool) -> None:
    payload = {"block": 0, "sharded": sharded, "infinite": True}
    ended = launch(4, "optimizer_cases:anomaly", payload, timeout_s=100)
    words = "infinite in the summed gradients of blocks.0.nothing (stage 0)"
    assert all(words in reason for reason in ended), ended
    assert sum(reason.startswith("AnomalyError") for reason in ended) >= 1


def test_without_detect_anomaly_an_infinite_gradient_is_a_gradient() -> None:
    payload = {"block": 0, "sharded": False, "infinite": True, "detect": False}
    assert launch(2, "optimizer_cases:anomaly", payload, timeout_s=100) == ["trained on"] * 2
