"""Runs functions of layered_memory_workers in processes with a memory limit each, with or without a node that has none."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch import free_port
from memory_limit import memory_limits

WORKERS = str(Path(__file__).with_name("layered_memory_workers.py"))


def run_within(
    limit_mb: float, ranks: int, target: str, folder: Path, *, node: bool = False, **payload: Any
) -> tuple[list[int], list[int], list[Any], str]:
    """Call a function of the workers in separate processes, each in its own cgroup with a memory limit. Returns the
    exit codes, the number of processes that the kernel has killed in each cgroup, the results, and the end of the
    outputs. The processes are not forked: copied pages that they share with their parent would count. With ``node``,
    an optimizer node without a limit runs, too."""
    folder.mkdir()
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with memory_limits(ranks, int(limit_mb * 1e6)) as limits, contextlib.ExitStack() as stack:
        (folder / "payload").write_bytes(pickle.dumps((target, payload, [limit.procs for limit in limits])))
        processes = []
        if node:
            environment |= {"HOLMES_NODE_SECRET": "known to all", "HOLMES_NODE_PORT": str(free_port())}
            log = stack.enter_context((folder / "lognode").open("w"))
            module = [
                sys.executable,
                "-m",
                "lightning_holmes.cli",
                "optimizer-node",
                "--",
                WORKERS,
                str(folder),
                "node",
            ]
            server = stack.enter_context(subprocess.Popen(module, env=environment, stdout=log, stderr=log))
            stack.callback(server.kill)
        for rank in range(ranks):
            log = stack.enter_context((folder / f"log{rank}").open("w"))
            command = [sys.executable, WORKERS, str(folder), str(rank)]
            env = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(stack.enter_context(subprocess.Popen(command, env=env, stdout=log, stderr=log)))
            stack.callback(processes[-1].kill)
        deadline = time.monotonic() + 280
        codes = [process.wait(deadline - time.monotonic()) for process in processes]
        kills = [limit.kills for limit in limits]
    paths = [folder / f"result{rank}" for rank in range(ranks)]
    tails = "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(ranks) if codes[rank])
    return codes, kills, [pickle.loads(path.read_bytes()) for path in paths if path.exists()], tails
