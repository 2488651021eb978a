"""Runs commands on the hosts of a testbed: starts them together, reads their output, and ends them in any case.

It owns the processes of one run; bed.py decides the commands and their environment.

    results = run_commands([HostCommand(...), ...], timeout_s=60, grace_s=10, echo=None)
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import enter
from testbed.cgroup import CpuGroup

_READERS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """The command of one host, and where to run it."""

    host: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    namespace: str  # the file of the host's network namespace
    hosts_file: Path  # replaces /etc/hosts
    group: CpuGroup
    folder: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """The result of a command on one host.

    exit_code is negative for a signal, and None if the command was ended: at the time limit (timed_out), or grace_s
    after another host's command failed. output is stdout and stderr in the order in which they arrived.
    """

    exit_code: int | None
    output: str
    seconds: float
    timed_out: bool


def run_commands(
    commands: Sequence[HostCommand], *, timeout_s: float, grace_s: float | None, echo: Callable[[str, str], None] | None
) -> dict[str, HostResult]:
    """Run the commands at the same time, leave no process running, and return the results by host.

    Args:
        timeout_s: everything is ended after this time.
        grace_s: how long the other commands may go on after one has failed; None: to the end.
        echo: called with host and line for each line of output.
    """
    started = time.monotonic()
    running: dict[str, subprocess.Popen[str]] = {}
    lines: dict[str, list[str]] = {command.host: [] for command in commands}
    ended: dict[str, float] = {}
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    deadline, timed_out = started + timeout_s, False
    try:
        for command in commands:
            command.group.create()
            running[command.host] = process = _start(command)
            reader = threading.Thread(target=_read, args=(process, command.host, lines[command.host], echo, lock))
            reader.start()
            readers.append(reader)
        while len(ended) < len(running):
            for host, process in running.items():
                if host not in ended and process.poll() is not None:
                    ended[host] = time.monotonic()
                    if process.returncode != 0 and grace_s is not None:
                        deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                timed_out = time.monotonic() > started + timeout_s
                break
            time.sleep(0.01)
    finally:
        for command in commands:
            command.group.kill()
        for process in running.values():
            process.kill()
            process.wait()
        for reader in readers:
            reader.join(_READERS_TIMEOUT_S)
        for process in running.values():
            assert process.stdout is not None
            process.stdout.close()
        for command in commands:
            command.group.remove()
    return {
        host: HostResult(
            exit_code=process.returncode if host in ended else None,
            output="".join(lines[host]),
            seconds=ended.get(host, time.monotonic()) - started,
            timed_out=timed_out and host not in ended,
        )
        for host, process in running.items()
    }


def _start(command: HostCommand) -> subprocess.Popen[str]:
    script = [sys.executable, "-I", "-S", enter.__file__]
    place = [str(command.group.procs), command.namespace, str(os.getpid()), command.host, str(command.hosts_file)]
    return subprocess.Popen(
        [*script, *place, *command.argv],
        env=dict(command.environment),
        cwd=command.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl+C must reach this process only
    )


def _read(
    process: subprocess.Popen[str],
    host: str,
    lines: list[str],
    echo: Callable[[str, str], None] | None,
    lock: threading.Lock,
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if echo is not None:
            with lock:
                echo(host, line.rstrip("\n"))
