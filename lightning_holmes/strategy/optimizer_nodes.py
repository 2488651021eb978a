"""OptimizerNodes: the optimizer nodes of a job, from the first fit that needs them to the end of the job.

Rank 0 keeps the store in which they meet, and starts the nodes on its own host, or, if HOLMES_NODE_SECRET is set, waits for nodes that are
started elsewhere by `lightning-holmes optimizer-node` with the same secret.

    nodes = OptimizerNodes(1, num_hosts=1, is_rank_0=True, master=None, ask_rank_0=ask, timeout=None, topology=topology)   # every rank
    by_rank = nodes.share(clusters)                              # every rank, in each fit
    links = nodes.open(about, clusters=clusters, ...)
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_holmes import errors
from lightning_holmes.cluster.interfaces import source_address
from lightning_holmes.cluster.topology import OptimizerHost, Topology
from lightning_holmes.comm.job_store import answer_within
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node.link import Link
from lightning_holmes.optim.node.role import (
    BEAT_S,
    DEFAULT_PORT,
    END,
    LEFT,
    PORT,
    SECRET,
    SILENT_S,
    open_store,
    read,
    versions,
    write,
)
from lightning_holmes.plan.node_routes import cluster_of, near_addresses, share_nodes

_START_S = 120.0  # a node imports torch and this package
_COME_S = 1800.0  # a node may be started later than rank 0
# rank 0 waits for this share of the time for which other ranks wait for it, so that its error reaches them
_SHARE = 0.8
_ANSWER_S = 5.0
_BREAK_S = 10.0  # seconds in which the connections to a node that has failed break
_END_S = 2.0


class OptimizerNodes:
    """``count`` optimizer nodes of a job of ``num_hosts`` hosts. All ranks must make one, together; the nodes then begin to start.

    Args:
        master: the address at which rank 0 waits for nodes of other hosts; None: for nodes of this host only.
        ask_rank_0: calls its argument on rank 0, and returns its result, or raises its error, on every rank.
        timeout: how long to wait for a node; None: without limit.
        topology: the topology of the workers.
        hosts: the hosts of a topology file that are optimizer nodes.

    Raises:
        ConfigurationError: the ranks are on several hosts, and there is no secret for nodes that are started elsewhere.
    """

    def __init__(
        self,
        count: int,
        *,
        num_hosts: int,
        master: str | None,
        is_rank_0: bool,
        ask_rank_0: Callable[[Callable[[], Any]], Any],
        timeout: timedelta | None,
        topology: Topology,
        hosts: Sequence[OptimizerHost] = (),
    ) -> None:
        given = os.environ.get(SECRET)
        if num_hosts > 1 and given is None:
            raise ConfigurationError(
                f"optimizer_nodes={count} with num_nodes={num_hosts}: nodes are started by themselves on one host only; set {SECRET} "
                f"to a secret of this job on all hosts, and start each node by `lightning-holmes optimizer-node -- SCRIPT`"
            )
        self._count, self._timeout, self._ask_rank_0 = count, timeout, ask_rank_0
        self._topology, self._hosts = topology, hosts
        self._nodes: list[dict[str, Any]] = []
        self._num_fits = 0
        self._store: Any = None
        self._is_over = threading.Event()
        weakref.finalize(self, self._is_over.set)
        self.processes: list[subprocess.Popen[bytes]] = []
        """The nodes that rank 0 has started itself."""
        if is_rank_0:
            self._host, port = ("127.0.0.1", 0) if given is None else (master or "127.0.0.1", _port())
            self._secret = given or secrets.token_hex(32)
            listener = _listen(self._host, port)
            self._port = listener.getsockname()[1]
            self._store = open_store(self._host, self._port, self._secret, listen=listener.detach())
            weakref.finalize(self, _end, self._store, count)
            if given is None:
                self.processes += [self._start(number) for number in range(count)]

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
        end, missing = time.monotonic() + wait_s, list(range(self._count))
        if not self.processes:
            print(f"waiting for {self._count} optimizer nodes at {self._host}:{self._port}", flush=True)
        while missing := [number for number in missing if not self._store.check([f"node/{number}"])]:
            ended = [process for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                why = (
                    f"process {ended[0].pid} ended with code {ended[0].returncode}; what it has printed says why"
                    if ended
                    else f"within {wait_s:.0f} s; nodes of other hosts are started by lightning-holmes optimizer-node, with this job's {SECRET}"
                )
                come = self._count - len(missing)
                raise self._refuse(
                    HolmesError(
                        f"{come} of {self._count} optimizer nodes have come to {self._host}:{self._port}: {why}"
                    )
                )
            time.sleep(0.1)
        mine = versions()
        for number in range(self._count):
            node = read(self._store, f"node/{number}")
            different = [
                f"{k} {node['versions'].get(k)}, here {mine[k]}" for k in mine if node["versions"].get(k) != mine[k]
            ]
            if different:
                said = f"optimizer node {number} on {node['host']} has {'; '.join(different)}: install the same versions on all hosts"
                raise self._refuse(ConfigurationError(said))
        if not self.processes and (come := self._store.add("nodes", 0)) > self._count:
            raise self._refuse(
                ConfigurationError(
                    f"optimizer_nodes={self._count}, but {come} nodes have come: start {self._count}, or set optimizer_nodes to the number "
                    f"of those that you start"
                )
            )
        return self._host, self._port, self._secret

    def _refuse(self, error: HolmesError) -> HolmesError:
        write(self._store, END, {"code": 1, "why": str(error)})
        return error

    def _meet(self) -> None:
        if not self._nodes:
            found = self._ask_rank_0(self._find)
            if self._store is None:
                self._store = open_store(*found)
            self._nodes = [read(self._store, f"node/{number}") for number in range(self._count)]
            names = [f"process {node['pid']} on host {node['host']}" for node in self._nodes]
            watch = (self._store.clone(), names, self._is_over)
            threading.Thread(target=_watch, args=watch, name="holmes-node-watch", daemon=True).start()

    def share(self, clusters: Sequence[str | None]) -> list[list[int]]:
        """Return for each pipeline rank the nodes that hold its stages; ``clusters``: of each pipeline rank. All ranks must call."""
        self._meet()
        return share_nodes(clusters, [self._cluster(node) for node in self._nodes])

    def clusters_of(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the clusters of nodes; None for nodes whose cluster is not known."""
        return [self._cluster(self._nodes[number]) for number in numbers]

    def _cluster(self, node: Mapping[str, Any]) -> str | None:
        return node["cluster"] or cluster_of(node["host"], self._hosts)

    def _addresses(self, number: int, ranks: Sequence[int]) -> list[str]:
        """Return the address of a node for each of these global ranks: on a fast card that they share, or else where rank 0 reaches it."""
        node, name = self._nodes[number], self._cluster(self._nodes[number])
        own = next((cluster for cluster in self._topology.clusters if cluster.name == name), None)
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
                    explain=_explainer(self._store, number),
                )
            )
        for link, own_units, number in zip(links, units, numbers, strict=True):
            sharing = sum(number in of_rank for of_rank in by_rank)
            link.tell({**about, "place": place, "num_places": sharing, "units": dict(own_units)})
        for link in links:
            link.told()
        return links


def _explainer(store: Any, number: int) -> Callable[[str], Exception]:
    """Return a function that makes the error of a lost connection to a node: the reason that the node has written, if any."""
    key = f"node/{number}/failure"

    def explain(said: str) -> Exception:
        with contextlib.suppress(Exception):  # rank 0, which keeps the store, may be gone
            if answer_within(lambda: store.check([key]), timeout_s=_ANSWER_S):
                kind, text = answer_within(lambda: read(store, key), timeout_s=_ANSWER_S)
                found = getattr(errors, kind, None)
                return (found if isinstance(found, type) and issubclass(found, HolmesError) else HolmesError)(text)
        return ConnectionLostError(
            f"connection lost to optimizer node {number}: its process has ended, or the network to it was cut. gloo says: {said}. The run "
            f"can go on from its last checkpoint"
        )

    return explain


def _watch(store: Any, nodes: Sequence[str], is_over: threading.Event) -> None:
    """End this process if one of the ``nodes`` shows no sign of life, until ``is_over``: gloo waits for a link that is cut."""
    beats = dict.fromkeys(range(len(nodes)), (-1, time.monotonic()))
    with contextlib.suppress(RuntimeError, dist.DistError):  # rank 0, which keeps the store, is gone
        while not is_over.wait(2 * BEAT_S) and not store.check([END]):
            for number, (before, since) in beats.items():
                if store.check([f"node/{number}/failure"]):
                    _, said = read(store, f"node/{number}/failure")
                    if not is_over.wait(_BREAK_S):  # mostly connections break, and tell it; not if a card is down
                        print(f"this rank ends: {said}", file=sys.stderr, flush=True)
                        os._exit(1)
                    return
                now = store.add(f"node/{number}/beats", 0)
                if now != before:
                    beats[number] = now, time.monotonic()
                elif time.monotonic() - since > SILENT_S:
                    said = f"optimizer node {number} has shown no sign of life for {SILENT_S:.0f} s"
                    print(
                        f"this rank ends: {said}: {nodes[number]} is stopped or cut off",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)


def _port() -> int:
    return int(os.environ.get(PORT, DEFAULT_PORT))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"nobody can listen for optimizer nodes at {host}:{port}: {error}; set {PORT}"
        ) from error


def _end(store: Any, count: int) -> None:
    """Tell the nodes that the job ends, as soon as the other ranks do not need them either; the store may end when they have read it."""
    with contextlib.suppress(Exception):
        if not store.check([END]):
            # last_value: the exception that ends a process
            write(store, END, {"code": int(getattr(sys, "last_value", None) is not None), "why": ""})
        here, end = sum(store.check([f"node/{number}"]) for number in range(count)), time.monotonic() + _END_S
        while store.add(LEFT, 0) < here and time.monotonic() < end:
            time.sleep(0.02)
