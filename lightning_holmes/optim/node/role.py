"""The role of an optimizer node: where nodes and the job's rank 0 meet, and what a node does from its start to its end.

    python -m lightning_holmes.optim.node HOST:PORT NUMBER [NODES ON THIS HOST]      # with the job's secret in HOLMES_NODE_SECRET

Rank 0 keeps a store; the names of its keys begin with a digest of the secret, so that jobs do not meet each other's nodes. A node writes
its host and addresses there, and waits for sessions (session.py). Ranks and nodes watch each other there (comm/failure.py).
"""

import contextlib
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_holmes.cluster.hardware import probe_host
from lightning_holmes.cluster.interfaces import source_address
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.errors import ConnectionLostError, HolmesError
from lightning_holmes.optim.node.link import pack, unpack
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.session import Session
from lightning_holmes.version import __version__

SECRET = "HOLMES_NODE_SECRET"
"""The environment variable that holds the job's secret."""
PORT = "HOLMES_NODE_PORT"
"""The environment variable that holds the port at which rank 0 waits for nodes on other hosts."""
DEFAULT_PORT = 29700
END = "end"
"""The key under which rank 0 writes the exit code when the job ends."""
LEFT = "left"
"""The key under which nodes count themselves when they have read that."""
_RANK_0_S = 120.0  # seconds to wait for rank 0
_DRAIN_S = 60.0  # seconds that workers may stay connected after rank 0 has ended
_LOOK_S = 0.05
JOB = "job"
"""The key under which rank 0 writes the numbers of ranks and of optimizer nodes of the job, and its versions."""
REFUSED = "refused"
"""The key under which a node writes why it is not one of this job's."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on workers and nodes."""
    return {"lightning_holmes": __version__, "torch": str(torch.__version__), "byte order": sys.byteorder}


def open_store(host: str, port: int, secret: str, *, listen: int | None = None) -> Any:
    """Return the store in which a job and its nodes meet; ``listen``: on rank 0, the descriptor of the socket at which it listens.

    Raises:
        ConnectionLostError: nobody listens at this address.
    """
    options: dict[str, Any] = {} if listen is None else {"is_master": True, "master_listen_fd": listen}
    if listen is None:  # torch would try again and again, and print a stack each time
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            raise ConnectionLostError(f"the job's rank 0 cannot be reached at {host}:{port}: {error}") from error
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, wait_for_workers=False, timeout=timedelta(seconds=60), **options
    )
    return PrefixStore(hashlib.sha256(secret.encode()).hexdigest(), store)


def write(store: Any, key: str, value: Any) -> None:
    """Write plain values into the store."""
    store.set(key, bytes(pack(value).numpy()))


def read(store: Any, key: str) -> Any:
    """Read what :func:`write` has written; waits for it."""
    return unpack(torch.frombuffer(bytearray(store.get(key)), dtype=torch.uint8))


class _Node:
    """One node of a job, from its joining to its end."""

    def __init__(self, store: Any, number: int, cards: Mapping[str, str], **options: Any) -> None:
        self._store, self._number, self._options = store, number, options
        self._interfaces = cards  # by the address of each fast card
        num_ranks, num_nodes, _ = read(store, JOB)
        self._watch = FailureWatch(store, num_ranks + number, num_ranks + num_nodes, num_nodes=num_nodes)
        self._watch.heartbeat.where = lambda: ("", True)  # nothing that a node does silences it
        self._failed = False
        self._open: set[threading.Thread] = set()
        self._num_sessions = 0

    def serve(self) -> int:
        """Serve the job's sessions until it ends; returns the exit code."""
        end = None
        with contextlib.suppress(RuntimeError, dist.DistError):  # rank 0 is gone
            while not self._failed and end is None:
                if self._store.check([f"node/{self._number}/session/{self._num_sessions}"]):
                    self._begin()
                elif self._store.check([END]):
                    end = read(self._store, END)
                    self._store.add(LEFT, 1)
                else:
                    time.sleep(_LOOK_S)
        deadline = time.monotonic() + _DRAIN_S
        while not self._failed and self._open and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not self._failed:
            self._watch.stop()
        if self._failed:
            return 1
        return int(not self._num_sessions) if end is None else int(end)

    def _begin(self) -> None:
        told = read(self._store, f"node/{self._number}/session/{self._num_sessions}")
        self._num_sessions += 1
        used = {self._interfaces[address] for address in told["addresses"] if address in self._interfaces}
        self._watch.cards = CardWatch(
            {name: f"the fast card {name} of host {socket.gethostname()} went down" for name in sorted(used)}
        )
        thread = threading.Thread(target=self._run, args=(told,), name="holmes-node-session", daemon=True)
        self._open.add(thread)
        thread.start()

    def _run(self, told: Mapping[str, Any]) -> None:
        try:
            Session(told, self._store.clone(), number=self._number, **self._options).run()
        except BaseException as error:
            kind, said = type(error), str(error)
            if not isinstance(error, HolmesError):
                kind, said = HolmesError, f"{kind.__name__}: {error}"
            name = f"optimizer node {self._number}, {told['place']}"
            said = said if said.startswith(name) else f"{name}: {said}"
            with contextlib.suppress(OSError):  # the disk of its log may be full
                print(f"{said}; this node ends", flush=True)
            self._watch.report(kind(said))
            self._failed = True
        self._open.discard(threading.current_thread())


def join(
    addresses: Sequence[tuple[str, int]], number: int, *, may_import: bool, options: NodeOptions, wait_s: float
) -> int:
    """Run an optimizer node for the job whose rank 0 listens at one of ``addresses``; returns the exit code.

    Args:
        number: the number of this node; -1: the next one that is free.
        may_import: whether to import the module of an optimizer's class if it is not imported yet.
        wait_s: seconds to wait for rank 0, which may be started later.

    Raises:
        ConnectionLostError: rank 0 cannot be reached within ``wait_s``, or ends while the node joins.
    """
    end = time.monotonic() + wait_s
    store, host = None, ""
    while store is None:
        for host, port in addresses:
            try:
                store = open_store(host, port, os.environ[SECRET])
                break
            except ConnectionLostError:
                if time.monotonic() > end:
                    raise
        else:
            time.sleep(1.0)
    number = store.add("nodes", 1) - 1 if number < 0 else number
    host_name = os.environ.get("HOLMES_HOST_NAME") or socket.gethostname()
    _, num_nodes, theirs = read(store, JOB)
    refusal = [
        f"{key} {mine}, and rank 0 {theirs.get(key)}" for key, mine in versions().items() if mine != theirs.get(key)
    ]
    said = f"has {'; '.join(refusal)}: install the same versions on all hosts"
    if number >= num_nodes:
        said = f"is one too many: start {num_nodes}, or set optimizer_nodes to the number of those that you start"
    if refusal or number >= num_nodes:
        said = f"optimizer node {number} on {host_name} {said}"
        write(store, REFUSED, said)
        print(said, flush=True)
        return 1
    ports = [port for port in probe_host().rdma if port.up]
    about = {
        "address": source_address(socket.gethostbyname(host)),
        "host": host_name,
        "pid": os.getpid(),
        "cluster": os.environ.get("HOLMES_CLUSTER"),
        "ports": [(port.kind, address) for port in ports for address in port.addresses],
    }
    write(store, f"node/{number}", about)
    cards = {
        address.partition("/")[0]: port.interface for port in ports if port.interface for address in port.addresses
    }
    try:
        node = _Node(store, number, cards, may_import=may_import, options=options)
    except RuntimeError as error:  # of the store's client
        raise ConnectionLostError(f"the job's rank 0 at {host}:{port} ended while this node joined: {error}") from error
    return node.serve()


def main(arguments: list[str]) -> int:
    """Run the command line that the module docstring describes; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers; the node ends with them
    where, number, *others = arguments
    host, _, port = where.rpartition(":")
    options = NodeOptions.given(None, None, *map(int, others))
    return join([(host, int(port))], int(number), may_import=True, options=options, wait_s=_RANK_0_S)
