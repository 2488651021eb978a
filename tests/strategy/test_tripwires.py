"""Hooks that read or change parameters and gradients: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches. Tolerance: 1e-5 relative (fp32). All cases of a
layout run in one launch.
"""

from typing import Any

import pytest
from comparing import differences
from launch import chosen, launch
from tripwire_cases import CASES, run_cases

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1f1b"}),
    "sharded": (4, {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "1f1b", "sharding": "optimizer"}),
    "alone": (1, {"num_microbatches": 2, "save_distributed_checkpoint": True}),
}
NOT_RUN = {"sharded": {"company": "a replica has another batch than the whole", "prunes": "refused"}}


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(
        {"cases": chosen(request, "name"), "folder": str(tmp_path_factory.mktemp("plain")), "holmes": None}
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def result(layout: str) -> Any:
        if layout not in known:
            size, holmes = LAYOUTS[layout]
            replicas = size // holmes.get("pipeline_parallel_size", 1)
            cases = [name for name in chosen(request, "name") if name not in NOT_RUN.get(layout, ())]
            payload = {"cases": cases, "folder": str(tmp_path_factory.mktemp(layout)), "holmes": holmes}
            known[layout] = launch(size, "tripwire_cases:run_cases", payload | {"replicas": replicas}, timeout_s=200)
        return known[layout]

    return result


@pytest.mark.xdist_group("tripwires")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_hooks_see_the_whole_module(layout: str, name: str, plain: Any, runs: Any) -> None:
    if name in NOT_RUN.get(layout, ()):
        pytest.skip(NOT_RUN[layout][name])
    assert "error" not in plain[name], plain[name]["error"]
    for rank, results in enumerate(runs(layout)):
        assert name in results, f"an earlier case ended the run: {list(results)[-1]}"
        assert "error" not in results[name], f"rank {rank}: {results[name]['error']}"
        found = differences(plain[name], results[name])
        if rank:
            found = [difference for difference in found if "on rank 0" not in difference]
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
