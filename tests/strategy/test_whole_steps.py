"""What a step may ask for as a whole equals plain Lightning's where the step runs whole; where it is split, it is refused with
a remedy.

Baselines: plain Lightning in one process, and DDP in two; parameters and logs to 1e-6.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from whole_step_cases import run

KEEP = "ask once, in setup(), as self.folder = self.trainer.log_dir"


def assert_equal(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.mark.parametrize("name", ["ReadsLogDir", "KeepsLogDir", "Computes", "LogsMetric", "Gathers", "Skips"])
def test_one_process_is_plain_lightning(name: str, tmp_path: Path) -> None:
    plain = run(name, "auto", tmp_path, logger=name == "ReadsLogDir")
    assert_equal(run(name, {}, tmp_path, logger=name == "ReadsLogDir"), plain)


@pytest.mark.parametrize(
    "holmes", [{}, {"num_microbatches": 2}, {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 2}]
)
def test_a_batch_that_is_skipped_leaves_what_was_gathered_to_the_optimizer(holmes: Any, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_equal(run("Skips", holmes, tmp_path, **options), run("Skips", "auto", tmp_path, **options))
    assert_equal(run("Skips", holmes, tmp_path), run("Skips", "auto", tmp_path))


def test_a_batch_of_which_one_microbatch_is_skipped_is_refused(tmp_path: Path) -> None:
    said = run("SkipsOneMicrobatch", {"num_microbatches": 4}, tmp_path)
    assert "returned NoneType without a loss tensor" in said


def test_a_metric_computed_in_a_step_needs_one_microbatch(tmp_path: Path) -> None:
    said = run("Computes", {"num_microbatches": 2}, tmp_path)
    assert "Computes.training_step calls self.mean.compute()" in said and "self.log(..., self.mean)" in said
    said = run("Computes", {"eval_num_microbatches": 2}, tmp_path)
    assert "Computes.validation_step calls self.mean.compute()" in said


ON_TWO = {
    # one stage, two replicas; "..." is DDP
    "log_dir": ("ReadsLogDir", {}, {"logger": True}),
    "log_dir ...": ("ReadsLogDir", "ddp", {"logger": True}),
    "log_dir in microbatches": ("ReadsLogDir", {"num_microbatches": 2}, {}),
    "compute": ("Computes", {}, {}),
    "compute ...": ("Computes", "ddp", {}),
    "gather": ("Gathers", {}, {}),
    "gather sharded": ("Gathers", {"sharding": "optimizer"}, {}),
    "gather ...": ("Gathers", "ddp", {}),
    "gather in microbatches": ("Gathers", {"num_microbatches": 2}, {}),
    "skip": ("Skips", {}, {}),
    # two stages
    "stages log_dir": ("ReadsLogDir", {"pipeline_parallel_size": 2}, {}),
    "stages log_dir of a logger": ("ReadsLogDir", {"pipeline_parallel_size": 2}, {"logger": True}),
    "stages log_dir kept": ("KeepsLogDir", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages compute": ("Computes", {"pipeline_parallel_size": 2}, {}),
    "stages compute in microbatches": ("Computes", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages metric": ("LogsMetric", {"pipeline_parallel_size": 2, "num_microbatches": 2}, {}),
    "stages gather": ("Gathers", {"pipeline_parallel_size": 2}, {}),
}
PLAIN = {"stages log_dir kept": "KeepsLogDir", "stages compute": "Computes", "stages metric": "LogsMetric"}
REFUSED = {
    "log_dir in microbatches": KEEP,
    "gather in microbatches": "num_microbatches=1",
    "skip": "without a loss tensor",
    "stages log_dir": KEEP,
    "stages log_dir of a logger": KEEP,
    "stages compute in microbatches": "self.log(..., self.mean)",
    "stages gather": "calls self.all_gather",
}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("two"))
    return launch(2, "whole_step_cases:on_each_rank", {"runs": ON_TWO, "folder": folder}, timeout_s=200)


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", [name for name in ON_TWO if f"{name.removesuffix(' sharded')} ..." in ON_TWO])
def test_replicas_of_a_whole_step_are_ddp(name: str, on_two: Any) -> None:
    for found in on_two:
        assert_equal(found[name], found[f"{name.removesuffix(' sharded')} ..."])


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", PLAIN)
def test_stages_give_the_numbers_of_plain_lightning(name: str, on_two: Any, tmp_path: Path) -> None:
    plain = run(PLAIN[name], "auto", tmp_path)
    for state, logged in (found[name] for found in on_two):
        torch.testing.assert_close(state, plain[0], rtol=1e-6, atol=1e-6)
        assert logged.keys() == plain[1].keys()
        if "seen" not in logged:  # "seen" is the length of a folder's name
            assert logged == pytest.approx(plain[1], rel=1e-6)


@pytest.mark.xdist_group("strategy_whole_steps")
@pytest.mark.parametrize("name", REFUSED)
def test_a_part_of_a_step_is_refused_with_the_cure_on_every_rank(name: str, on_two: Any) -> None:
    for found in on_two:
        assert isinstance(found[name], str) and REFUSED[name] in found[name], found[name]
