"""Runs a function in several processes that form one job, as torchrun would, and collects what it returns.

    results = launch(4, "parity_cases:train", {"case": "gpt"}, timeout_s=120)   # one entry a rank

The function is named "module:function" with a module of the tests; it is called with the payload in each
process, where Lightning finds rank and world size in the environment. Nothing is left running.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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
    port, pids = free_port(), {}
    started = time.monotonic()
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
        }
        env |= environment(rank) if environment is not None else {}
        pids[rank] = _nursery().start(folder, rank, env)
    ended: dict[int, float] = {}
    try:
        while len(ended) < world_size and time.monotonic() - started < timeout_s:
            for rank in pids:
                if rank not in ended and (folder / f"exit{rank}").exists():
                    ended[rank] = time.monotonic() - started
            time.sleep(0.02)
    finally:
        for rank, pid in pids.items():
            if rank not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return [
        Worker(
            exit_code=int((folder / f"exit{rank}").read_text()) if rank in ended else None,
            output=(folder / f"log{rank}").read_text(errors="replace"),
            seconds=ended.get(rank, timeout_s),
        )
        for rank in pids
    ]


class Nursery:
    """A process that has imported torch, Lightning and this package, and forks the workers.

    The imports are most of what a short run costs. It ends, with its workers, when this process does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "launch.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    @property
    def alive(self) -> bool:
        """Whether it can start workers."""
        return self._process.poll() is None

    def start(self, folder: Path, rank: int, env: dict[str, str]) -> int:
        """Start a worker for what is written in ``folder``; its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps({"folder": str(folder), "rank": rank, "env": env}), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


_nurseries: list[Nursery] = []
_nurseries_lock = threading.Lock()


def _nursery() -> Nursery:
    """This process's own, made when the first worker is wanted."""
    with _nurseries_lock:
        if not _nurseries or not _nurseries[0].alive:
            _nurseries[:] = [Nursery()]
        return _nurseries[0]


def _serve() -> dict[str, Any] | None:
    """Fork a worker for each line of standard input, and write down how each ended. Returns what a worker is to do."""
    for name in ("torch", "lightning.pytorch", "torchmetrics", "lightning_holmes"):
        importlib.import_module(name)
    gc.freeze()  # what is imported stays: a worker's collections need not go through it, each a fifth of a second
    workers: dict[int, Path] = {}
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02 if workers else None)
        while workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            path = workers.pop(pid)
            path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
            path.with_suffix(".part").rename(path)
        if not readable:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return order  # type: ignore[no-any-return]
            workers[pid] = Path(order["folder"]) / f"exit{order['rank']}"
            print(pid, flush=True)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return None


def _become_worker(folder: str, rank: int, env: dict[str, str]) -> None:
    """In the forked process: an environment, a log and random numbers of its own."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.modules["numpy"].random.seed()


def _work(folder: Path) -> None:
    target, payload = pickle.loads((folder / "payload").read_bytes())
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(payload)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    sys.modules["launch"] = sys.modules["__main__"]
    sys.path[:0] = [str(TESTS), *sorted(str(p) for p in TESTS.iterdir() if p.is_dir())]
    work = _serve()
    if work is not None:
        _become_worker(**work)
        _work(Path(work["folder"]))
