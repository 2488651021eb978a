"""Batches that are objects, such as graphs: run whole, split by the module's own ``split_batch``, compared between stages.

Baseline: plain Lightning in one process; parameters and loss to 1e-5.
"""

from typing import Any

import pytest
import torch
from graph_cases import Network, Splitting, loader, run
from launch import launch

from lightning_holmes import check

pytestmark = pytest.mark.xdist_group("strategy_graphs")


def assert_equal(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_check_takes_graphs() -> None:
    batch = next(iter(loader()))
    assert check(Network(), batch, num_microbatches=1).exact
    assert check(Splitting(), batch, num_microbatches=2).exact


def test_stages_and_microbatches_are_plain_lightning_or_refused_with_a_cure() -> None:
    whole, split = run("auto"), run("auto", splits=True)
    assert_equal(run({}), whole)
    assert_equal(run({"num_microbatches": 2}, splits=True), split)
    for found in launch(2, "graph_cases:on_each_rank"):
        assert_equal(found["two stages"], whole)
        assert_equal(found["first stage loads"], whole)
        assert_equal(found["split by the module"], split)
        assert "split_batch" in found["not split"] and "num_microbatches=1" in found["not split"]
        assert_equal(found["other data"], whole)  # the first stage's, without being asked to
