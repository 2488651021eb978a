"""Seconds from launching the recipe on four processes to the start of its first step; the figure is printed."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_four_processes_reach_their_first_step_within_twenty_seconds(tmp_path: Path) -> None:
    seconds = [start_up(tmp_path)]
    while min(seconds) >= 20 and len(seconds) < 5:  # what else runs on the machine only adds
        seconds.append(start_up(tmp_path))
    shown = ", ".join(f"{s:.1f}" for s in seconds)
    print(f"\nstart-up of recipes/gpt_tiny on 4 processes: {shown} s to the first step (under 20)")
    assert min(seconds) < 20


def start_up(folder: Path) -> float:
    command = [
        str(Path(sys.executable).parent / "lightning-holmes"),
        "fit",
        "--config=recipes/gpt_tiny/config.yaml",
        "--config=tests/benchmarks/start_up.yaml",
        f"--trainer.default_root_dir={folder}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": "tests/benchmarks"}
    started = time.time()
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    marks = [float(m) for m in re.findall(r"first step begins at ([\d.]+)", run.stdout + run.stderr)]
    assert len(marks) == 4
    return max(marks) - started
