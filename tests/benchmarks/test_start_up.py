"""Seconds from launching the demo's recipe on four processes to its first step, and to a loss that tells that it learns.

The limit is 20 s. If the machine is so slow that Lightning's own DDP needs as long for the same recipe (importing
Lightning, reading the config, joining four processes), the limit is 1.35 times DDP's time: a run of Holmes also finds
the layers, counts their costs and plans. Both are then started in turn, and their medians compared.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S, OF_DDP = 20.0, 1.35


@pytest.mark.timeout(900)
def test_four_processes_reach_their_first_step_within_twenty_seconds_and_learn_within_three_minutes(
    tmp_path: Path,
) -> None:
    first, losses = run_recipe(tmp_path, steps=60)
    seconds, others, limit = [first], [], WITHIN_S
    while min(seconds) >= WITHIN_S and statistics.median(seconds) >= limit and len(seconds) < 6:
        others.append(run_recipe(tmp_path, strategy="ddp")[0])
        seconds.append(run_recipe(tmp_path)[0])
        limit = max(WITHIN_S, OF_DDP * statistics.median(others))
    shown = ", ".join(f"{s:.1f}" for s in seconds)
    print(f"\nstart-up of recipes/gpt_tiny on 4 processes: {shown} s to the first step")
    print(f"judged by the best of all, under {WITHIN_S:.0f} s, or by their median, under {limit:.1f} s")
    if others:
        print(f"the same with Lightning's DDP: {', '.join(f'{s:.1f}' for s in others)} s")
    number, reached = next(((n, s) for n, loss, s in losses if loss < 2.6), (0, 0.0))
    print(f"loss {losses[0][1]:.2f} at step 1; below 2.6 at step {number}, {reached:.0f} s after launch (under 180)")
    assert 5.3 < losses[0][1] < 5.8
    assert number and reached < 180
    assert min(seconds) < WITHIN_S or statistics.median(seconds) < limit


def run_recipe(folder: Path, steps: int = 1, strategy: str = "") -> tuple[float, list[tuple[int, float, float]]]:
    """Return the seconds from the launch to the first step of the last process, and the number, loss and seconds of
    each step."""
    command = [
        str(Path(sys.executable).parent / "lightning-holmes"),
        "fit",
        "--config=recipes/gpt_tiny/config.yaml",
        "--config=tests/benchmarks/start_up.yaml",
        f"--trainer.max_steps={steps}",
        f"--trainer.default_root_dir={folder}",
    ]
    if strategy:  # instead of the recipe's
        command.append(f"--trainer.strategy={strategy}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": "tests/benchmarks"}
    started = time.time()
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    marks = [float(m) for m in re.findall(r"first step begins at ([\d.]+)", run.stdout + run.stderr)]
    assert len(marks) == 4
    found = re.findall(r"step (\d+): loss ([\d.]+) at ([\d.]+)", run.stdout)
    return max(marks) - started, [(int(n), float(loss), float(at) - started) for n, loss, at in found]
