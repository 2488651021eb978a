"""OptimizerNodes: the optimizer nodes of a job, from the first fit that needs them to the end of the job.

Rank 0 keeps the store in which they meet, and starts the nodes on its own host, or, if HOLMES_NODE_SECRET is set, waits for nodes that are
started elsewhere by `lightning-holmes optimizer-node` with the same secret.

    nodes = OptimizerNodes(1, connection, topology)              # every rank
    by_rank = nodes.share(clusters)                              # every rank, in each fit
    links = nodes.open(about, clusters=clusters, ...)
"""

import contextlib
import functools
import os
import secrets
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from lightning_holmes import errors
from lightning_holmes.cluster.interfaces import source_address
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node.link import Link
from lightning_holmes.optim.node.role import (
    DEFAULT_PORT,
    END,
    JOB,
    LEFT,
    PORT,
    REFUSED,
    SECRET,
    open_store,
    read,
    versions,
    write,
)
from lightning_holmes.plan.node_routes import cluster_of, near_addresses, share_nodes
from lightning_holmes.strategy.connection import Connection

_START_S = 120.0  # a node imports torch and this package
_COME_S = 1800.0  # a node may be started later than rank 0
# rank 0 waits for this share of the time for which other ranks wait for it, so that its error reaches them
_SHARE = 0.8
_END_S = 2.0


class OptimizerNodes:
    """``count`` optimizer nodes of a job. All ranks must make one, together; the nodes then begin to start.

    Args:
        connection: to the other ranks.
        topology: the topology of the workers.

    Raises:
        ConfigurationError: the ranks are on several hosts, and there is no secret for nodes that are started elsewhere.
    """

    def __init__(self, count: int, connection: Connection, topology: Topology) -> None:
        given = os.environ.get(SECRET)
        if connection.num_nodes > 1 and given is None:
            raise ConfigurationError(
                f"optimizer_nodes={count} with num_nodes={connection.num_nodes}: nodes are started by themselves on one host only; set {SECRET} "
                f"to a secret of this job on all hosts, and start each node by `lightning-holmes optimizer-node -- SCRIPT`"
            )
        self._count, self._connection, self._topology = count, connection, topology
        self._timeout = connection.options.timeout
        self._nodes: list[dict[str, Any]] = []
        self._num_fits = 0
        self._store: Any = None
        self.processes: list[subprocess.Popen[bytes]] = []
        """The nodes that rank 0 has started itself."""
        if connection.rank == 0:
            self._host, port = ("127.0.0.1", 0) if given is None else (connection.master or "127.0.0.1", _port())
            self._secret = given or secrets.token_hex(32)
            listener = _listen(self._host, port)
            self._port = listener.getsockname()[1]
            self._store = open_store(self._host, self._port, self._secret, listen=listener.detach())
            write(self._store, JOB, (connection.world_size, count, versions()))
            self._watch()
            if given is None:
                self.processes += [self._start(number) for number in range(count)]

    def _watch(self) -> None:
        """Watch the nodes, and be watched by them, until this object is not needed any more."""
        connection, count = self._connection, self._count
        watch = FailureWatch(self._store, connection.rank, connection.world_size + count, num_nodes=count)
        connection.node_watch = watch
        weakref.finalize(self, _end, watch, self._store, count if connection.rank == 0 else 0)

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
        environment = os.environ | {
            SECRET: self._secret,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        where = [f"{self._host}:{self._port}", str(number), str(self._count)]
        return subprocess.Popen(
            [python, "-m", "lightning_holmes.optim.node", *where], env=environment, stdin=subprocess.DEVNULL
        )

    def _find(self) -> tuple[str, int, str]:
        """Wait for the nodes, on rank 0; returns where they and the other ranks meet."""
        wait_s = _SHARE * (_COME_S if self._timeout is None else self._timeout.total_seconds())
        wait_s = min(_START_S, wait_s) if self.processes else wait_s
        end = time.monotonic() + wait_s
        if not self.processes:
            print(f"waiting for {self._count} optimizer nodes at {self._host}:{self._port}", flush=True)
        while True:
            if self._store.check([REFUSED]):
                raise ConfigurationError(read(self._store, REFUSED))
            come = sum(self._store.check([f"node/{number}"]) for number in range(self._count))
            if come == self._count:
                return self._host, self._port, self._secret
            ended = [process for process in self.processes if process.poll() is not None]
            why = f"within {wait_s:.0f} s; nodes of other hosts are started by lightning-holmes optimizer-node, with this job's {SECRET}"
            if ended:
                why = f"process {ended[0].pid} ended with code {ended[0].returncode}; what it has printed says why"
            if ended or time.monotonic() > end:
                where = f"{self._host}:{self._port}"
                raise HolmesError(f"{come} of {self._count} optimizer nodes have come to {where}: {why}")
            time.sleep(0.1)

    def _meet(self) -> None:
        if not self._nodes:
            found = self._connection.ask_rank_0(self._find)
            if self._store is None:
                self._store = open_store(*found)
                self._watch()
            self._nodes = [read(self._store, f"node/{number}") for number in range(self._count)]
            for node in self._nodes:
                node["cluster"] = node["cluster"] or cluster_of(node["host"], self._connection.options.optimizer_hosts)

    def share(self, clusters: Sequence[str | None]) -> list[list[int]]:
        """Return for each pipeline rank the nodes that hold its stages; ``clusters``: of each pipeline rank. All ranks must call."""
        self._meet()
        return share_nodes(clusters, [node["cluster"] for node in self._nodes])

    def clusters_of(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the clusters of nodes; None for nodes whose cluster is not known."""
        return [self._nodes[number]["cluster"] for number in numbers]

    def _addresses(self, number: int, ranks: Sequence[int]) -> list[str]:
        """Return the address of a node for each of these global ranks: on a fast card that they share, or else where rank 0 reaches it."""
        node = self._nodes[number]
        own = next((cluster for cluster in self._topology.clusters if cluster.name == node["cluster"]), None)
        near = {} if own is None else near_addresses(own, node["ports"])
        return [near.get(self._topology.host_of_rank(rank).name, node["address"]) for rank in ranks]

    def open(
        self,
        about: Mapping[str, Any],
        *,
        clusters: Sequence[str | None],
        pipeline_rank: int,
        ranks: Sequence[int],
        worker: int,
        units: Sequence[Mapping[int, Any]],
    ) -> list[Link]:
        """Connect to the nodes of this rank's stages. All ranks must call.

        Args:
            about: what each node is told; see Session.
            clusters: for each pipeline rank, the cluster that contains all of its workers, or None.
            ranks: the global ranks that hold the same stages, of which this one is number ``worker``.
            units: for each node of this rank, the layouts of its units by number.

        Raises:
            HolmesError: a node cannot be reached, or cannot serve these workers.
        """
        self._num_fits += 1
        by_rank = self.share(clusters)
        numbers = by_rank[pipeline_rank]
        place = f"pipeline rank {pipeline_rank}"
        links = []
        for number in numbers:
            name, addresses = f"fit/{self._num_fits}/{pipeline_rank}/{number}", self._addresses(number, ranks)
            if worker == 0:
                session = self._store.add(f"node/{number}/sessions", 1) - 1
                told = {"name": name, "place": place, "addresses": addresses}
                write(self._store, f"node/{number}/session/{session}", told)
            own = source_address(addresses[worker])
            assert own is not None, f"no way to {addresses[worker]}"
            links.append(
                Link(
                    PrefixStore(f"{name}/{worker}", self._store),
                    own,
                    is_node=False,
                    peer=f"optimizer node {number}",
                    timeout=self._timeout,
                    explain=functools.partial(self._explain, number),
                )
            )
        for link, own_units, number in zip(links, units, numbers, strict=True):
            sharing = sum(number in of_rank for of_rank in by_rank)
            link.answer({**about, "place": place, "num_places": sharing, "units": dict(own_units)})
        for link in links:
            link.hear()
        return links

    def _explain(self, number: int, said: str) -> BaseException:
        """Return the error for a lost connection to a node: the one for which the node ends, if it has told."""
        watch = self._connection.node_watch
        lost = ConnectionLostError(
            f"connection lost to optimizer node {number}: its process has ended, or the network to it was cut. gloo says: {said}. The run "
            f"can go on from its last checkpoint"
        )
        found = lost if watch is None else watch.explain(lost)
        if found is lost or watch is None or watch.cause is None or watch.cause.name is None:
            return found
        kind, _, text = watch.cause.words.partition(": ")
        made: type[HolmesError] = getattr(errors, kind, HolmesError)
        return made(text)


def _port() -> int:
    return int(os.environ.get(PORT, DEFAULT_PORT))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"nobody can listen for optimizer nodes at {host}:{port}: {error}; set {PORT}"
        ) from error


def _end(watch: FailureWatch, store: Any, num_nodes: int) -> None:
    """End the watch; on rank 0 the nodes are told before that the job ends. Its store may end when all have read that."""
    here = 0
    with contextlib.suppress(Exception):
        if num_nodes:
            # last_value: the exception that ends a process
            write(store, END, int(getattr(sys, "last_value", None) is not None))
            here, end = sum(store.check([f"node/{number}"]) for number in range(num_nodes)), time.monotonic() + _END_S
        while num_nodes and store.add(LEFT, 0) < here and time.monotonic() < end:
            time.sleep(0.02)
    watch.stop(at_exit=False)
    if here == num_nodes > 0:
        watch.see_off()
