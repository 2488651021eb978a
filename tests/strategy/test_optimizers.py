"""Optimizers, precisions and averages over stages: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches (one microbatch). Tolerance: 1e-5 relative in
fp32; 2e-3 with 16-bit floats, whose 10 mantissa bits round sums in another order.
"""

from pathlib import Path
from typing import Any

import pytest
from comparing import differences
from launch import chosen, launch
from optimizer_cases import CASES, run_cases

TOLERANCE = {"loss_scaling": 2e-3}
REPLICATED = ["averages", "grad_norm", "finetuning"]
STAGED = {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "1f1b"}
"""The schedule is given where there are replicas, so that no batch is spent on choosing one."""
SHARDED = [name for name in CASES if name != "finetuning"]  # finetuning is refused

IN_SHARDS = [name for name in CASES if name not in ("averages", "finetuning", "grad_norm")]  # these are refused


@pytest.fixture(scope="module")
def runs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of plain Lightning and of two stages; those of the averages and of the scaled losses are always asked for."""
    cases = list(dict.fromkeys([*chosen(request, "name"), "averages", "loss_scaling"]))
    payload = {"cases": cases, "folder": str(tmp_path_factory.mktemp("plain")), "holmes": None}
    plain = run_cases(payload)
    holmes = {"pipeline_parallel_size": 2, "num_microbatches": 1}
    staged = payload | {"holmes": holmes, "folder": str(tmp_path_factory.mktemp("staged"))}
    return plain, launch(2, "optimizer_cases:run_cases", staged, timeout_s=200)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two stages and two replicas; checkpoints are single files."""
    holmes = STAGED | {"save_distributed_checkpoint": False}
    payload = {
        "cases": REPLICATED,
        "folder": str(tmp_path_factory.mktemp("replicated")),
        "holmes": holmes,
        "replicas": 2,
    }
    return launch(4, "optimizer_cases:run_cases", payload, timeout_s=200)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two stages and two replicas with a sharded optimizer; checkpoints are folders."""
    holmes = STAGED | {"sharding": "optimizer"}
    payload = {"cases": SHARDED, "folder": str(tmp_path_factory.mktemp("sharded")), "holmes": holmes, "replicas": 2}
    return launch(4, "optimizer_cases:run_cases", payload, timeout_s=300)


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two replicas with sharded parameters, gradients and states; checkpoints are folders."""
    holmes = {"sharding": "parameters", "num_microbatches": 1}
    payload = {"cases": IN_SHARDS, "folder": str(tmp_path_factory.mktemp("in_shards")), "holmes": holmes, "replicas": 2}
    return launch(2, "optimizer_cases:run_cases", payload, timeout_s=200)


@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize("name", list(CASES))
def test_every_rank_has_the_numbers_of_plain_lightning(name: str, runs: Any) -> None:
    compare(name, *runs)


@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize("name", REPLICATED)
def test_every_rank_of_every_replica_has_the_numbers_of_plain_lightning(name: str, runs: Any, replicated: Any) -> None:
    compare(name, runs[0], replicated)


@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_over_replicas_every_rank_has_the_numbers_of_plain_lightning(
    name: str, runs: Any, sharded: Any
) -> None:
    compare(name, runs[0], sharded)


@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize("name", IN_SHARDS)
def test_in_shards_every_rank_has_the_numbers_of_plain_lightning(name: str, runs: Any, in_shards: Any) -> None:
    compare(name, runs[0], in_shards)


def compare(name: str, plain: dict[str, Any], staged: list[dict[str, Any]]) -> None:
    """Compare every rank's results of a case with those of plain Lightning."""
    for rank, results in enumerate([plain, *staged]):
        assert name in results, f"an earlier case ended the run: {list(results)[-1]}"
        assert "error" not in results[name], f"{'plain' if rank == 0 else f'rank {rank - 1}'}: {results[name]['error']}"
    expected = plain[name]
    if name == "torchs_average":  # averages of this rank's own parameters
        everything = expected["local"]
        assert set().union(*(results[name]["local"] for results in staged)) == set(everything)
    for rank, results in enumerate(staged):
        if name == "torchs_average":
            expected = expected | {"local": {key: everything[key] for key in results[name]["local"]}}
        found = differences(expected, results[name], relative=TOLERANCE.get(name, 1e-5))
        assert not found, f"rank {rank} differs from plain Lightning:\n" + "\n".join(found[:20])


@pytest.mark.xdist_group("optimizers")
def test_an_average_goes_on_where_it_stopped(runs: Any) -> None:
    for results in runs[1]:
        for name in ("ema", "mean"):
            averages = results["averages"]
            assert not differences(averages[name]["weights"], averages[f"{name}_resumed"], relative=1e-5)


@pytest.mark.xdist_group("optimizers")
def test_an_overflow_is_skipped_by_all_stages(runs: Any) -> None:
    for results in runs:
        for result in results if isinstance(results, list) else [results]:
            assert result["loss_scaling"]["overflows"]["scale"] < 2.0**40


@pytest.mark.xdist_group("optimizers")
def test_an_anomaly_ends_all_ranks_and_names_the_operator(tmp_path: Path) -> None:
    first, last = launch(2, "optimizer_cases:anomaly", {"block": 3, "sharded": "auto"}, timeout_s=100)
    assert "SqrtBackward0" in last and "in the backward of stage 1, microbatch 0" in last
    assert "rank 1" in first and "SqrtBackward0" in first


@pytest.mark.xdist_group("optimizers")
def test_an_anomaly_of_the_first_stage_ends_all_replicas(tmp_path: Path) -> None:
    ended = launch(4, "optimizer_cases:anomaly", {"block": 0, "sharded": True}, timeout_s=100)
    assert all("SqrtBackward0" in reason for reason in ended), ended
    assert sum("in the backward of stage 0, microbatch 0" in reason for reason in ended) >= 1


@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize("sharded", [False, True])
def test_an_infinite_gradient_ends_all_ranks_and_names_the_parameter(sharded: bool) -> None:
    payload = {"block": 0, "sharded": sharded, "infinite": True}
    ended = launch(4, "optimizer_cases:anomaly", payload, timeout_s=100)
    words = "infinite in the summed gradients of blocks.0.nothing (stage 0)"
    assert all(words in reason for reason in ended), ended
    assert sum(reason.startswith("AnomalyError") for reason in ended) >= 1


@pytest.mark.xdist_group("optimizers")
def test_without_detect_anomaly_an_infinite_gradient_is_a_gradient() -> None:
    payload = {"block": 0, "sharded": False, "infinite": True, "detect": False}
    assert launch(2, "optimizer_cases:anomaly", payload, timeout_s=100) == ["trained on"] * 2
