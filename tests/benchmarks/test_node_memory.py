"""The memory of a worker with an optimizer node: two layers, however deep the module is; and the depth that it trains
within a limit, compared with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
from launch import launch
from memory_runs import run_within

pytestmark = pytest.mark.benchmark

WIDTH, RANKS, MORE_MB = 1024, 4, 60.0
LAYER_MB = 4 * WIDTH * WIDTH / 1e6
NODES = {"optimizer_nodes": 1}


def test_a_worker_holds_two_layers_however_deep_the_module_is(tmp_path: Path) -> None:
    """At most two layers' weights and gradients plus 60 MB, from before the module is built to the end of a fit with
    validation and a save to a folder; 36 more layers have 151 MB more weights."""
    highest = {}
    for depth in (12, 24, 48):
        payload = {"width": WIDTH, "depths": [depth], "folder": str(tmp_path), "holmes": NODES}
        ranks = launch(RANKS, "layered_memory_workers:peaks", payload, timeout_s=280)
        for phase in ("fit", "save", "validate"):
            grown = [rank[depth][phase] for rank in ranks]
            print(f"{depth} layers, {phase}: {', '.join(f'{mb:.0f}' for mb in grown)} MB")
        highest[depth] = max(rank[depth]["save"] for rank in ranks)
    assert max(highest.values()) <= 4 * LAYER_MB + MORE_MB


WORKER_MB, STEP = 600.0, 4


@pytest.mark.timeout(1200)
def test_three_times_the_depth_that_fsdp2_trains_within_the_same_limit(tmp_path: Path) -> None:
    """Four workers with 600 MB each, including their imports; activation checkpointing in both."""
    found = run_within(1e6, 1, "bare", tmp_path / "bare")[2]
    limit_mb = WORKER_MB - found[0]["resident"]

    def trains(strategy: Any, depth: int, *, node: bool) -> bool:
        folder = tmp_path / f"{depth}-{node}"
        settings = {"width": WIDTH, "depth": depth, "strategy": strategy, "epochs": 1, "is_checkpointed": True}
        codes, kills, each, log = run_within(limit_mb, RANKS, "train", folder, node=node, **settings)
        assert any(kills) or not any(codes), log
        peaks = ", ".join(f"{one['grown']:.0f}" for one in each)
        print(
            f"{strategy}, {depth} layers: {f'{peaks} of {limit_mb:.0f} MB' if not any(codes) else 'ended by the kernel'}"
        )
        return not any(codes)

    deepest, too_deep = 0, STEP * round(RANKS * limit_mb / (4 * LAYER_MB) / STEP)
    assert not trains("fsdp2", too_deep, node=False)  # its shards alone fill the limit
    while too_deep - deepest > STEP:
        middle = STEP * ((deepest + too_deep) // 2 // STEP)
        deepest, too_deep = (middle, too_deep) if trains("fsdp2", middle, node=False) else (deepest, middle)
    assert deepest > 0
    with_nodes = {times: trains(NODES | {"num_microbatches": 2}, times * deepest, node=True) for times in (3, 12)}
    assert with_nodes[3]
