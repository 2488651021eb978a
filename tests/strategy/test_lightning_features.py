"""Lightning's features with the strategy: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches. Tolerance: 1e-5 relative (fp32). All cases of a
layout run in one launch.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_alike, differences
from launch import chosen, launch
from strategy_cases import CASES, Classifier, Resumable, Setting, build, run_cases, samples

# with several microbatches a step runs several times, which the first and the last of these cases would see
WHOLE_BATCHES = ["collects", "broadcast_batch", "resume", "front_state", "paces"]
REPLICATED = ["logs", "metrics", "callbacks", "accumulate", "groups", "all_steps", "resume"]
PIPELINE = [name for name in CASES if name not in ("collects", "front_state", "paces", "resume")]
STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives results of plain Lightning, each of one run."""
    folder = str(tmp_path_factory.mktemp("plain"))
    return cache(lambda name: run_cases({"cases": [name], "holmes": None, "folder": folder}))


def _launch(folder: Path, world_size: int, cases: list[str], **holmes: Any) -> Any:
    payload = {"cases": cases, "holmes": STAGES | holmes, "replicas": world_size // 2, "folder": str(folder)}
    return launch(world_size, "strategy_cases:run_cases", payload, timeout_s=150), folder


@pytest.fixture(scope="module")
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two stages with two microbatches."""
    return _launch(tmp_path_factory.mktemp("staged"), 2, chosen(request, "name"))


@pytest.fixture(scope="module")
def whole_batches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two stages with one microbatch; some tests below ask for the resumed run."""
    cases = list(dict.fromkeys([*chosen(request, "name"), "resume"]))
    options = {"num_microbatches": 1, "save_distributed_checkpoint": False}
    return _launch(tmp_path_factory.mktemp("staged"), 2, cases, **options)


@pytest.fixture(scope="module")
def replicated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two stages and two replicas; the schedule is given here, while the pipelines of two ranks choose it."""
    options = {"schedule": "1f1b", "save_distributed_checkpoint": False}
    return _launch(tmp_path_factory.mktemp("staged"), 4, chosen(request, "name"), **options)


@pytest.mark.xdist_group("strategy_pipeline")
@pytest.mark.parametrize("name", PIPELINE)
def test_pipeline(name: str, plain: Any, pipeline: Any) -> None:
    assert_alike(name, plain(name), pipeline[0])


@pytest.mark.xdist_group("strategy_pipeline")
@pytest.mark.parametrize("name", WHOLE_BATCHES)
def test_whole_batches(name: str, plain: Any, whole_batches: Any) -> None:
    assert_alike(name, plain(name), whole_batches[0])


@pytest.mark.xdist_group("strategy_replicated")
@pytest.mark.parametrize("name", REPLICATED)
def test_replicated(name: str, plain: Any, replicated: Any) -> None:
    # A metric's value of one step is that of one replica, as in every strategy of Lightning; so are predictions.
    ignored = {"metrics": "_step", "all_steps": ".predict"}
    assert_alike(name, plain(name), replicated[0], ignore=ignored.get(name, ""))


@pytest.mark.xdist_group("strategy_pipeline")
def test_a_resumed_run_continues_as_if_never_stopped(whole_batches: Any) -> None:
    for result in whole_batches[0]:
        whole, ended = result["resume"]["never_stopped"], result["resume"]["ended"]
        assert not differences(whole["weights"], ended["weights"], relative=1e-6)
        tail = [line for line in whole["lines"] if line[0] >= 6]
        assert not differences(tail, ended["lines"][-len(tail) :], relative=1e-6)


@pytest.mark.xdist_group("strategy_pipeline")
def test_plain_lightning_loads_and_continues_the_checkpoint(plain: Any, whole_batches: Any, tmp_path: Path) -> None:
    path = whole_batches[1] / "resume" / "resume" / "last.ckpt"
    module = Resumable.load_from_checkpoint(path, weights_only=True)
    assert isinstance(module, Classifier)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert list(saved) == list(module.state_dict())
    setting = Setting(tmp_path)
    trainer = setting.trainer(max_epochs=4)
    continued = build(Resumable)
    trainer.fit(continued, setting.loader(samples()), setting.loader(samples(16, 1)), ckpt_path=path)
    expected = plain("resume")["resume"]["never_stopped"]
    assert not differences(expected["weights"], continued.state_dict(), relative=1e-5)
