"""Jobs that are killed and started again: they go on from the snapshot that is left, and end with the same weights, bit for bit.

Baseline: the same job without faults.
"""

import json
import pickle
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launch import Worker, launch_raw
from snapshot_cases import STEPS


def job(size: int, folder: Path, name: str, *, fails: bool = False, **options: Any) -> list[Worker]:
    payload = {"folder": str(folder), "name": name, **options}
    workers = launch_raw(size, "snapshot_cases:train", payload, timeout_s=90, folder=folder / name)
    shown = "\n".join(f"--- {w.exit_code}\n{w.output[-3000:]}" for w in workers)
    assert all(w.exit_code is not None and (w.exit_code != 0) == fails for w in workers), shown
    return workers


def weights(size: int, folder: Path, name: str) -> list[str]:
    return [pickle.loads((folder / name / f"result{rank}").read_bytes()) for rank in range(size)]


def losses(folder: Path, name: str, rank: int = 0) -> dict[int, Any]:
    lines = map(json.loads, (folder / f"losses.{name}.{rank}").read_text().splitlines())
    return {step: rest for step, *rest in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(size: int, **strategy: Any) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("whole")
        job(size, folder, "whole", strategy=strategy)
        return folder, weights(size, folder, "whole")

    return run


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_job_goes_on_from_its_snapshot_bit_for_bit(size: int, whole: Any, tmp_path: Path) -> None:
    draw = random.Random(size)
    baseline, expected = whole(size, pipeline_parallel_size=2)
    kill = {"rank": draw.randrange(size), "step": draw.randrange(4, STEPS)}
    strategy = {"pipeline_parallel_size": 2, "snapshot_every_n_steps": 3}
    job(size, tmp_path, "killed", fails=True, kill=kill, strategy=strategy, snapshots=str(tmp_path / "memory"))
    workers = job(size, tmp_path, "again", strategy=strategy, snapshots=str(tmp_path / "memory"))
    assert weights(size, tmp_path, "again") == expected
    before, after, known = (losses(*of) for of in ((tmp_path, "killed"), (tmp_path, "again"), (baseline, "whole")))
    resumed = min(after) - 1
    assert (
        max(before) == kill["step"] and resumed % 3 == 1 and kill["step"] - 6 < resumed
    )  # the last may not have been written
    assert {**before, **after} == known and all(before[s] == after[s] for s in before.keys() & after.keys())
    assert (
        f"goes on from the snapshot of step {min(after) - 1}, {kill['step'] - min(after) + 1} before"
        in workers[0].output
    )
