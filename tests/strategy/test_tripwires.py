"""Hooks that read or change parameters and gradients: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches. Tolerance: 1e-5 relative (fp32). All cases of a
layout run in one launch.
"""

import copy
from typing import Any

import pytest
import torch
from launch import chosen, launch
from strategy_cases import differences
from tripwire_cases import CASES, run_cases

from lightning_holmes.strategy.tripwires import _Watch

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1f1b"}),
    "sharded": (4, {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "1f1b", "sharding": "optimizer"}),
    "alone": (1, {"num_microbatches": 2, "save_distributed_checkpoint": True}),
}
NOT_RUN = {"sharded": {"company": "a replica has another batch than the whole", "prunes": "refused"}}


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda p: p.norm(), [("value", ["weight"])]),
        (lambda p: p.detach(), [("value", ["weight"])]),
        (lambda p: p.data, [("value", ["weight"])]),
        (lambda p: p.tolist(), [("value", ["weight"])]),
        (lambda p: torch._foreach_norm([p, p.new_ones(1)]), [("value", ["weight"])]),
        (lambda p: torch.nn.utils.parameters_to_vector(p for p in [p]), [("value", ["weight"])]),
        (copy.deepcopy, [("value", ["weight"])]),
        (lambda p: p.grad, [("grad", ["weight"])]),
        (lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0), [("grad", ["weight"])]),
        (
            lambda p: (
                p.shape,
                p.numel(),
                p.dtype,
                p.requires_grad,
                p.is_floating_point(),
                torch.zeros_like(p),
                len(p),
            ),
            [],
        ),
        (lambda p: torch.optim.SGD([p], 0.1).zero_grad(), []),
        (lambda p: torch.ones(2).norm(), []),
    ],
)
def test_what_an_operation_would_read_is_told_before_it_does(read: Any, told: list[Any]) -> None:
    parameter, found = torch.nn.Parameter(torch.ones(3)), []
    watch = _Watch({id(parameter): "weight"}, lambda kind, names: found.append((kind, names)))
    read(parameter)
    assert found == []
    with watch:
        read(parameter)
    assert found[:1] == told[:1], found


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
