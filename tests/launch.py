"""Runs a function in several processes that form one job, as torchrun would, and collects what it returns.

    results = launch(4, "parity_cases:train", {"case": "gpt"}, timeout_s=120)   # one entry a rank

The function is named "module:function" with a module of the tests; it is called with the payload in each
process, where Lightning finds rank and world size in the environment. Nothing is left running.
"""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


class WorkerFailure(AssertionError):
    """A worker ended with an error or too late; the message holds the end of every worker's output."""


@dataclass
class Worker:
    """One finished process: its exit code, output, and seconds from launch to end."""

    exit_code: int | None
    output: str
    seconds: float


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(world_size: int, target: str, payload: Any = None, *, timeout_s: float = 120.0) -> list[Any]:
    """Call ``target`` in ``world_size`` processes and return what each returned, by rank.

    Raises:
        WorkerFailure: a process failed or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="holmes-test-") as folder:
        workers = launch_raw(world_size, target, payload, timeout_s=timeout_s, folder=Path(folder))
        if any(w.exit_code != 0 for w in workers):
            tails = [f"--- rank {r}: exit {w.exit_code}\n{w.output[-3000:]}" for r, w in enumerate(workers)]
            raise WorkerFailure(f"{target} failed\n" + "\n".join(tails))
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world_size)]


def launch_raw(
    world_size: int, target: str, payload: Any, *, timeout_s: float, folder: Path, environment: Any = None
) -> list[Worker]:
    """Like :func:`launch`, but returns exit codes and outputs whatever they are.

    ``environment(rank)`` gives further variables for a rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "payload").write_bytes(pickle.dumps((target, payload)))
    port, processes = free_port(), []
    started = time.monotonic()
    logs = [(folder / f"log{rank}").open("w+b") for rank in range(world_size)]
    try:
        for rank in range(world_size):
            env = os.environ | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_RUN_ID": "test",
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sorted(str(p) for p in TESTS.iterdir() if p.is_dir())]),
            }
            env |= environment(rank) if environment is not None else {}
            command = [sys.executable, str(TESTS / "launch.py"), str(folder)]
            processes.append(subprocess.Popen(command, env=env, stdout=logs[rank], stderr=subprocess.STDOUT))
        ended: dict[int, float] = {}
        while len(ended) < world_size and time.monotonic() - started < timeout_s:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - started
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=20)
        for log in logs:
            log.close()
    return [
        Worker(
            exit_code=process.returncode if rank in ended else None,
            output=(folder / f"log{rank}").read_text(errors="replace"),
            seconds=ended.get(rank, timeout_s),
        )
        for rank, process in enumerate(processes)
    ]


def _work(folder: Path) -> None:
    target, payload = pickle.loads((folder / "payload").read_bytes())
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(payload)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    _work(Path(sys.argv[1]))
