"""What a worker holds of parameters in shards: resident memory, at its highest, of four processes that train a deep module."""

from pathlib import Path

import pytest
from launch import launch
from layered_memory_workers import STATES

pytestmark = pytest.mark.benchmark

WIDTH, RANKS, MORE_MB = 1024, 4, 60.0
LAYER_MB = 4 * WIDTH * WIDTH / 1e6


def test_a_worker_holds_its_share_and_two_layers(tmp_path: Path) -> None:
    """At most a quarter of parameters, gradients and states, two layers and 60 MB, from before the module is built to the end of a fit
    with validation, a saved folder and an evaluation afterwards."""
    payload = {"width": WIDTH, "depths": [24], "folder": str(tmp_path)}
    ranks = launch(RANKS, "layered_memory_workers:peaks", payload, timeout_s=280)
    everything = STATES * 24 * LAYER_MB
    for phase in ("fit", "save", "validate"):
        grown = [rank[24][phase] for rank in ranks]
        print(f"{phase}: {', '.join(f'{mb:.0f}' for mb in grown)} MB of {everything:.0f} MB")
        assert max(grown) <= everything / RANKS + 2 * LAYER_MB + MORE_MB
