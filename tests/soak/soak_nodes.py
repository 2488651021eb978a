"""The optimizer nodes of a soak job: processes that outlive the job's starts, as if on their own hosts. A node that
has ended is restarted with the job, as an operator would do.

    with Nodes(folder, layout, memory=None) as nodes:
        nodes.start()                       # before each start of the job, whose ranks have nodes.environment
        nodes.signal(signal.SIGKILL, 0)
        nodes.wrong(...)                    # after it
"""

import contextlib
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

from faults import Layout
from launch import free_port, start_worker

_ENDS_S = 20.0
"""How long a node may take to end after the last worker."""
_UGLY = re.compile(r"Traceback|terminate called|Segmentation fault|core dumped|Fatal Python error|double free")


class Nodes:
    """The optimizer nodes; they are killed when the context is left.

    Args:
        memory: if the nodes are on a worker's host, the path where ranks see snapshots and that host's own folder; None: they are on other hosts.
    """

    def __init__(self, folder: Path, layout: Layout, *, memory: tuple[Path, Path] | None) -> None:
        self._folder, self._layout, self._memory = folder, layout, memory
        self._number = layout.nodes
        self._started: list[list[tuple[int, Path]]] = [[] for _ in range(self._number)]
        self._signalled: set[Path] = set()
        self._told = ""
        self.environment = (
            {"HOLMES_NODE_SECRET": "known to both", "HOLMES_NODE_PORT": str(free_port())} if layout.nodes else {}
        )
        self.states = folder / "states"

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self._number):
            self.signal(signal.SIGKILL, number)

    def start(self) -> None:
        """Start the nodes that are not running."""
        for number, started in enumerate(self._started):
            if started and not self._has_ended(number):
                continue
            folder = self._folder / f"node{number}.{len(started)}"
            folder.mkdir(parents=True)
            payload: dict[str, Any] = {
                "script": self._layout.options | {"folder": str(folder), "name": "node"},
                "arguments": ["--states", str(self.states)] if self._layout.options.get("states_on_disk") else [],
                "memory": None if self._memory is None else tuple(map(str, self._memory)),
            }
            (folder / "payload").write_bytes(pickle.dumps(("soak_cases:serve", payload)))
            host = {"HOLMES_HOST_NAME": f"node{number}", "HOLMES_CLUSTER": (self._layout.sites or ("",))[0]}
            started.append((start_worker(folder, 0, self._layout.size, 0, self.environment | host), folder))

    def signal(self, number: int, node: int) -> None:
        """Send a signal to this node, if it has not ended."""
        if self._started[node] and not self._has_ended(node):
            pid, folder = self._started[node][-1]
            if number == signal.SIGKILL:
                self._signalled.add(folder)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _has_ended(self, node: int) -> bool:
        return (self._started[node][-1][1] / "exit0").exists()

    def output(self) -> str:
        """Return the last output of all node processes."""
        return "".join(
            f"--- {folder.name}\n{(folder / 'log0').read_text(errors='replace')[-2500:]}\n"
            for started in self._started
            for _, folder in started
        )

    def wrong(self, *, is_done: bool, was_interrupted: bool, rank_0_was_well: bool) -> str:
        """Return the problem found after a start of the job, or "": a node that ended although the job is restarted,
        or that is still running after the job has finished. Waits for killed nodes to end."""
        end = time.monotonic() + _ENDS_S
        for node, started in enumerate(self._started):
            folder = started[-1][1]
            while (is_done or folder in self._signalled) and not self._has_ended(node):
                if time.monotonic() > end:
                    return f"node {node} does not end"
                time.sleep(0.02)
            code = int((folder / "exit0").read_text()) if self._has_ended(node) else None
            is_expected = {
                None: not is_done,
                0: is_done or rank_0_was_well,
                1: was_interrupted and not is_done,
                -signal.SIGKILL: folder in self._signalled,
            }
            if not is_expected.get(code, False):
                return f"node {node} has ended with {code}"
            if _UGLY.search((folder / "log0").read_text(errors="replace")):
                return f"node {node} has failed"
        # the next start of a killed node removes its leftover files
        is_clean = is_done and not any(started[-1][1] in self._signalled for started in self._started)
        left = list(self.states.glob("*")) if is_clean else []
        return f"{left} is left by a node" if left else ""
