"""How fast an optimizer node updates its states on disk, beside plain reads and writes of the same bytes in one run."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.benchmark

LAYERS, WIDTH, MEMORY_MB = 72, 2048, 900
"""302 M parameters; with their states 3.63 GB, four times the memory of the node's process."""
HERE = Path(__file__).parent


def run(way: str, folder: Path) -> dict[str, Any]:
    """Run node_disk_worker.py and return its figures."""
    command = [
        sys.executable,
        str(HERE / "node_disk_worker.py"),
        str(folder),
        *map(str, (LAYERS, WIDTH, MEMORY_MB)),
        way,
    ]
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent / "optim"), *sys.path])
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    gigabytes, bare_s = found["bytes_each_way"] / 1e9, statistics.mean(found["bare_s"])
    found["share"] = bare_s / found["update_s"]
    print(
        f"\n{way}: {found['parameters'] / 1e6:.0f} M parameters, {gigabytes:.2f} GB each way, memory "
        f"{found['peak_bytes'] / 1e6:.0f} of {found['limit_bytes'] / 1e6:.0f} MB; update {found['update_s']:.2f} s "
        f"({gigabytes / found['update_s']:.2f} GB/s), the disk alone {' and '.join(f'{s:.2f}' for s in found['bare_s'])} s: "
        f"{found['share']:.2f}"
    )
    assert found["peak_bytes"] <= found["limit_bytes"]
    return found


@pytest.mark.parametrize("way", ["eager", "deferred"])
def test_updates_are_as_fast_as_the_disk(way: str, tmp_path: Path) -> None:
    """At least 0.85 of the disk's own rate. In "deferred", gradients for which there is no memory are also written
    and read."""
    assert run(way, tmp_path)["share"] >= 0.85
