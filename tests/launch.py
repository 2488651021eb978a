"""Run a function in several processes that form one job, as torchrun would, and collect the return values.

    results = launch(4, "parity_cases:train", {"case": "gpt"}, timeout_s=120)   # one entry per rank

The function is named "module:function", with a module of the tests; it is called with the payload in each
process. Lightning finds rank and world size in the environment. No process is left running. On a testbed,
the command of forked_python() replaces the interpreter.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PATIENCE = 4.0
"""Factor on the limits of launches, which are written for a machine that does nothing else: they end what hangs."""


class WorkerFailure(AssertionError):
    """A worker failed or timed out; the message contains the end of every worker's output."""


@dataclass
class Worker:
    """One finished process: its exit code, output, and seconds from launch to end."""

    exit_code: int | None
    output: str
    seconds: float


def busyness() -> float:
    """How many times longer something takes here now than alone on the machine, for tests that measure seconds."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    """Return a port that is not in use now and is outside the kernel's ephemeral range (from 32768 on): the kernel
    might assign such a port before a worker listens there."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def launch(world_size: int, target: str, payload: Any = None, *, timeout_s: float = 120.0) -> list[Any]:
    """Call ``target`` in ``world_size`` processes and return the results, ordered by rank.

    Raises:
        WorkerFailure: a process failed or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="holmes-test-") as folder:
        workers = launch_raw(world_size, target, payload, timeout_s=timeout_s, folder=Path(folder))
        if any(w.exit_code != 0 for w in workers):
            tails = [f"--- rank {r}: exit {w.exit_code}\n{w.output[-3000:]}" for r, w in enumerate(workers)]
            raise WorkerFailure(f"{target} failed\n" + "\n".join(tails))
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world_size)]


def in_threads(count: int, work: Callable[[int], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """Call ``work`` for each rank in a thread of this process; return the results or exceptions, by rank."""
    pool = ThreadPoolExecutor(count)
    calls = [pool.submit(work, rank) for rank in range(count)]
    return [call.exception(timeout=timeout_s) or call.result() for call in calls]


def chosen(request: Any, argument: str) -> list[Any]:
    """Return the values of a parameter for which tests of this module ask for the calling fixture in this session, so that
    a launch of many cases runs those that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    asking = [
        item.callspec.params for item in items if request.fixturename in item.fixturenames and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(params[argument] for params in asking if argument in params))


def launch_raw(
    world_size: int, target: str, payload: Any, *, timeout_s: float, folder: Path, environment: Any = None
) -> list[Worker]:
    """Like :func:`launch`, but return exit codes and outputs even if workers fail or time out.

    ``environment(rank)`` gives additional environment variables for a rank.
    """
    timeout_s *= PATIENCE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "payload").write_bytes(pickle.dumps((target, payload)))
    port, pids = free_port(), {}
    started = time.monotonic()
    for rank in range(world_size):
        given = environment(rank) if environment is not None else {}
        pids[rank] = start_worker(folder, rank, world_size, port, given)
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
            output=log.read_text(errors="replace") if (log := folder / f"log{rank}").exists() else "",
            seconds=ended.get(rank, timeout_s),
        )
        for rank in pids
    ]


def start_worker(
    folder: Path, rank: int, world_size: int, port: int, environment: Mapping[str, str] | None = None
) -> int:
    """Start one rank and return its process id. ``folder`` holds the "payload", which says what to run, and receives
    the rank's result, log and exit code."""
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
    return _nursery().start(folder, rank, env | dict(environment or {}))


class Nursery:
    """A process that has imported torch, Lightning and this package, and forks the workers.

    The imports take most of the time of a short run. The nursery and its workers end when this process does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="holmes-nursery-")
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "launch.py"), str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[listener.fileno()],
                text=True,
            )
        self.python = [sys.executable, "-I", "-S", str(TESTS / "forked.py"), address]
        self.executable = Path(self._folder.name, "python")
        self.executable.write_text(f'#!/bin/sh\nexec {shlex.join(self.python)} "$@"\n')
        self.executable.chmod(0o755)

    @property
    def alive(self) -> bool:
        """Whether the nursery can start workers."""
        return self._process.poll() is None

    def start(self, folder: Path, rank: int, env: dict[str, str]) -> int:
        """Start a worker for the payload in ``folder`` and return its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps({"folder": str(folder), "rank": rank, "env": env}), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


_nurseries: list[Nursery] = []
_nurseries_lock = threading.Lock()


def _nursery() -> Nursery:
    """Return this process's nursery, creating it when the first worker is needed."""
    with _nurseries_lock:
        if not _nurseries or not _nurseries[0].alive:
            _nurseries[:] = [Nursery()]
        return _nurseries[0]


def forked_python() -> list[str]:
    """Return the command that replaces ``python`` on a host of a testbed: the nursery forks the process, so its
    imports are already done. It is followed by a script, or -m and a module, and arguments."""
    return _nursery().python


def forked_executable() -> str:
    """Return the same command as a single executable file, for torchrun, which starts PYTHON_EXEC."""
    return str(_nursery().executable)


def prepare_for_fits() -> None:
    """Prepare a process that runs many fits, or forks such processes: freeze the imported objects, which saves each
    garbage collection a fifth of a second, and cache the installed entry points, which each Trainer reads."""
    registry = sys.modules.get("lightning.fabric.utilities.registry")
    if registry is not None and not hasattr(registry.entry_points, "cache_info"):
        registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
    keep_what_is_left()


def keep_what_is_left() -> None:
    """Freeze the objects that the last fit left, such as caches and imports, so that the garbage collections of later
    fits do not visit them."""
    gc.collect()
    gc.freeze()


def _serve(listener: socket.socket) -> Callable[[], None] | None:
    """Fork a worker for each line of standard input and write its exit code to a file; fork a process for each
    connection and send its exit code. Returns, in a forked process, the function that it is to run."""
    gc.disable()
    for name in ("torch", "lightning.pytorch", "torchmetrics", "lightning_holmes"):
        importlib.import_module(name)
    from lightning_holmes.cluster.topology import Topology

    Topology.single_cluster(1, 1)  # pydantic builds its validators once, before the forks
    # an optional extra; importing it takes half a second in each worker that uses its models
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.modeling_utils")
    prepare_for_fits()
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # else torch unloads its 176 libraries in each worker
    workers: dict[int, Path] = {}
    clients: dict[socket.socket, int] = {}
    buffer = b""
    while True:
        poll = select.poll()
        for file, what in ((0, select.POLLIN), (listener.fileno(), select.POLLIN), *((c.fileno(), 0) for c in clients)):
            poll.register(file, what)  # for a client, only poll whether it has disconnected
        happened = dict(poll.poll(20 if workers or clients else None))
        while workers or clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            if pid in workers:
                path = workers.pop(pid)
                with contextlib.suppress(FileNotFoundError):  # nobody waits for it: it was killed after its timeout
                    path.with_suffix(".part").write_text(str(code))
                    path.with_suffix(".part").rename(path)
            for client in [c for c, of in clients.items() if of == pid]:
                _tell(client, code)
                del clients[client]
                client.close()
        for client, pid in clients.items():
            if client.fileno() in happened:
                os.kill(pid, signal.SIGKILL)
        if listener.fileno() in happened:
            client, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                for other in clients:
                    other.close()
                listener.close()
                return functools.partial(_become_python, client)
            clients[client] = pid
            _tell(client, pid)
        if 0 not in happened:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return functools.partial(_become_worker, **order)
            workers[pid] = Path(order["folder"]) / f"exit{order['rank']}"
            print(pid, flush=True)
    for pid in [*workers, *clients.values()]:
        os.kill(pid, signal.SIGKILL)
    return None


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client may have ended
        client.sendall(f"{number}\n".encode())


def _become_worker(folder: str, rank: int, env: dict[str, str]) -> None:
    """In the forked process: set its own environment, log and random numbers, and call the payload's function."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _take_over(log, log, env)
    faulthandler.enable()  # a crash in C code leaves Python's stacks in the log
    target, payload = pickle.loads(Path(folder, "payload").read_bytes())
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    gc.freeze()
    result = function(payload)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    _end_at_once()


def _end_at_once() -> None:
    """Do what is visible to others when the interpreter ends: wait for threads, call registered exit functions, flush
    the output. A normal exit would also destroy all modules, and so copy most of the memory that is shared with
    the nursery, which takes 0.4 s of processor time. A worker that fails, and a process that replaces python, end
    normally."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _become_python(client: socket.socket) -> None:
    """In the forked process: take over the host, folder, output and environment of the client, then run its script or
    module."""
    data, outputs, _, _ = socket.recv_fds(client, 1 << 16, 2)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 16)
    client.close()
    order = json.loads(data)
    os.setsid()  # as the client has: Linux shares CPU time between sessions, and measured rates depend on it
    _enter_host(order["pid"])
    os.chdir(order["folder"])
    _take_over(*outputs, order["env"])
    # Lightning's launcher starts the other ranks with this executable
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    script, *sys.argv[1:] = (argument for argument in order["argv"] if argument != "-u")
    installed = [path for path in sys.path if not path.startswith(str(TESTS))]
    sys.path[:] = ["", *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep)), *installed]
    if script == "-m":
        module, *sys.argv[1:] = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0], sys.path[0] = script, str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def _enter_host(pid: int) -> None:
    """Join the cpu cgroup and the namespaces of process ``pid``, and end when the nursery does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    from testbed.cgroup import find_cpu_hierarchy

    hierarchy = find_cpu_hierarchy()
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" if hierarchy.version == 2 else "cpu" in controllers.split(","):
            Path(f"{hierarchy.root}{path}/cgroup.procs").write_text(str(os.getpid()))
    for descriptor in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _take_over(output: int, errors: int, env: dict[str, str]) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    sys.modules["launch"] = sys.modules["__main__"]
    sys.path[:0] = [str(TESTS), *sorted(str(p) for p in TESTS.iterdir() if p.is_dir()), str(TESTS.parent)]
    work = _serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        work()
