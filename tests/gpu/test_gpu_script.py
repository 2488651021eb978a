"""`make gpu` at tiny sizes on the CPU, so that the script never rots; on a GPU it is run by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_script.py")
PARTS = ("parity", "checkpoint", "faults", "step_time", "mfu", "syncs", "memory", "node", "sockets")
pytestmark = [pytest.mark.versions, pytest.mark.xdist_group("gpu script")]


@pytest.mark.timeout(900)
def test_the_script_for_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    parts = [part for part in PARTS if part != "mfu"]  # which is step_time with another model
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", *parts],
        env=os.environ | {"HOLMES_GPU_OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for part in parts:
        rows = json.loads((tmp_path / f"{part}.json").read_text())
        assert rows and all(row["ok"] is not False for row in rows)


def test_an_unknown_part_is_refused_and_the_parts_fit_into_eight_minutes() -> None:
    from gpu_parts import PARTS as known

    assert tuple(known) == PARTS and sum(seconds for _, seconds in known.values()) <= 480
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny", "speed"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "unknown part speed" in done.stderr
