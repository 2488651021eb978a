"""A rank that is late in a hook is waited for as long as the timeout allows, wherever others wait for it."""

import re
from pathlib import Path

import pytest
from launch import launch, launch_raw

pytestmark = pytest.mark.xdist_group("strategy_late")


def test_a_rank_that_is_later_than_groups_may_take_to_connect_does_not_end_the_run(tmp_path: Path) -> None:
    ended = launch(4, "late_cases:late", {"folder": str(tmp_path)}, timeout_s=150)
    assert [step for step, _ in ended] == [3] * 4
    assert len({loss for _, loss in ended}) == 1


def test_a_rank_that_never_leaves_a_hook_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    workers = launch_raw(2, "late_cases:stuck", {"folder": str(tmp_path)}, timeout_s=120, folder=tmp_path / "job")
    assert [worker.exit_code for worker in workers] == [1, 1], workers
    said = r"ConnectionLostError: connection lost on rank 0 while all ranks read in Late.on_train_batch_start and leave it .*nothing came within the timeout"
    named = (
        r".*Timed out waiting 5000ms.*rank 1 on host \S+, in step 1, does not come: it is in .*late_cases.py:\d+ wait"
    )
    assert re.search(said + named, workers[0].output), workers[0].output
    assert "[rank 1] ends, because rank 0 failed in step 1: ConnectionLostError" in workers[1].output, workers[1].output


def test_ranks_that_are_interrupted_while_they_start_end(tmp_path: Path) -> None:
    workers = launch_raw(2, "late_cases:interrupted", {"folder": str(tmp_path)}, timeout_s=120, folder=tmp_path / "job")
    assert all(worker.exit_code in (1, 130) for worker in workers), workers
    # the other rank may lose the store of the first one before its own signal comes
    assert any(re.search("KeyboardInterrupt|ends by SIGINT", worker.output) for worker in workers), workers
