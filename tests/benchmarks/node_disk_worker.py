"""An optimizer node with parameters and states of several times its memory on disk, compared with plain reads and
writes of the same size.

    PYTHONPATH=tests:tests/optim python tests/benchmarks/node_disk_worker.py FOLDER LAYERS WIDTH MEMORY_MB eager|deferred

Prints as JSON the seconds of a step's update, the seconds for only reading and writing the same bytes, before and
after it, and the peak of the process's memory with its limit. A thread of the process supplies gradients as fast as
the node takes them.
"""

import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from node_driver import Driver, told_of

from lightning_holmes.optim.node.link import Action

REQUEST_BYTES, NUM_REQUESTS, WINDOWS = 4 << 20, 8, 3


def bare_seconds(folder: str, num_bytes: int) -> float:
    """Return the seconds for reading ``num_bytes`` of a file and writing them again, in requests of 4 MB, eight at
    once, past the page cache. The file is written before, since blocks that were never written are not read from the
    disk."""
    path = Path(folder) / "bare"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    starts = range(0, num_bytes, REQUEST_BYTES)
    buffers = [mmap.mmap(-1, REQUEST_BYTES) for _ in range(NUM_REQUESTS)]

    def run(place: int, reads: bool) -> None:
        for start in starts[place::NUM_REQUESTS]:
            if reads:
                os.preadv(fd, [buffers[place]], start)
            os.pwritev(fd, [buffers[place]], start)

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(run, range(NUM_REQUESTS), [False] * NUM_REQUESTS))
        began = time.perf_counter()
        list(pool.map(run, range(NUM_REQUESTS), [True] * NUM_REQUESTS))
        seconds = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return seconds


def peak_bytes() -> int:
    """Return the peak resident memory since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(folder: str, layers: str, width: str, memory_mb: str, way: str) -> dict[str, Any]:
    """Run once and return the figures."""
    torch.set_num_threads(os.cpu_count() or 1)  # a node has its host to itself
    side = int(width)
    told = told_of("adamw", num_layers=int(layers), shape=(side, side), states=folder)
    gradient = torch.full((side * side + side,), 1e-3)
    Path("/proc/self/clear_refs").write_text("5")
    resident = psutil.Process().memory_info().rss
    limit = int(memory_mb) * 1_000_000
    driver = Driver(told, memory=limit - resident)
    is_eager = way == "eager"
    num_elements = sum(unit.numel for unit in driver.units.values())
    num_bytes = num_elements * (12 if is_eager else 16)
    bare = [bare_seconds(folder, num_bytes)]
    driver.run(num_windows=1, gradient=gradient, is_eager=is_eager, fetches=False)
    driver.ask(Action.SETTLE)
    began = time.perf_counter()
    driver.run(num_windows=WINDOWS, gradient=gradient, is_eager=is_eager, fetches=False, first=2)
    driver.ask(Action.SETTLE)
    update = (time.perf_counter() - began) / WINDOWS
    peak = peak_bytes()
    driver.close()
    bare.append(bare_seconds(folder, num_bytes))
    return {
        "parameters": num_elements,
        "bytes_each_way": num_bytes,
        "update_s": update,
        "bare_s": bare,
        "peak_bytes": peak,
        "limit_bytes": limit,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
