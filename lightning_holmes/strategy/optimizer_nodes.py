"""OptimizerNodes: the optimizer nodes of a job, from the first fit that needs them to the end of the job.

Rank 0 starts the nodes on its own host, or, if HOLMES_NODE_SECRET is set, waits for nodes that are started elsewhere by `lightning-holmes
optimizer-node` with the same secret. Then it tells the other ranks the nodes' addresses.

    nodes = OptimizerNodes(
        1, num_hosts=1, is_rank_0=True, master=None, ask_rank_0=ask, timeout=None, topology=topology
    )                                                            # every rank must call
    by_rank = nodes.share(clusters)                              # every rank, in each fit
    links = nodes.open(units, place_of, told, ...)
"""

import itertools
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_holmes.cluster.topology import OptimizerHost, Topology
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node.channel import Address, Channel
from lightning_holmes.optim.node.description import UnitLayout
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.optim.node.server import DEFAULT_PORT, PORT, SECRET, Listener, versions
from lightning_holmes.plan.node_routes import near_addresses

_START_S = 120.0  # a node imports torch and this package
_COME_S = 1800.0  # a node may be started later than rank 0
# rank 0 waits for this share of the time for which other ranks wait for it, so that its error reaches them
_SHARE = 0.8
EVERYWHERE = ""
"""The key, in a node's addresses by worker host, of the address for all hosts that have no entry of their own."""


class OptimizerNodes:
    """``count`` optimizer nodes of a job of ``num_hosts`` hosts. All ranks must make one, together; the nodes then begin to start.

    Args:
        master: the address at which rank 0 waits for nodes of other hosts; None: for nodes of this host only.
        ask_rank_0: calls its argument on rank 0, and returns its result, or raises its error, on every rank.
        timeout: how long to wait for a node; None: without limit.
        topology: the topology of the workers, among which this process is ``rank``.
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
        rank: int = 0,
        hosts: Sequence[OptimizerHost] = (),
    ) -> None:
        given = os.environ.get(SECRET)
        if num_hosts > 1 and given is None:
            raise ConfigurationError(
                f"optimizer_nodes={count} with num_nodes={num_hosts}: nodes are started by themselves on one host only; set {SECRET} "
                f"to a secret of this job on all hosts, and start each node by `lightning-holmes optimizer-node -- SCRIPT`"
            )
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        self._ask_rank_0 = ask_rank_0
        self.outlive = given is not None
        """Whether the nodes are started elsewhere, and stay when this job's processes end."""
        self._secret, self._addresses, self._clusters = "", list[Mapping[str, Address]](), list[str | None]()
        self._kept: list[list[Any]] = []
        self._hosts, self._topology = hosts, topology
        self._host = topology.host_of_rank(rank).name
        self._num_sessions = 0
        self._registry: _Registry | None = None
        if is_rank_0:
            wait_s = _SHARE * (_COME_S if self._timeout_s is None else self._timeout_s)
            if given is None:
                self._registry = _Registry("127.0.0.1", secrets.token_hex(32), count, wait_s=min(_START_S, wait_s))
            else:
                port = int(os.environ.get(PORT, DEFAULT_PORT))
                self._registry = _Registry(master or "127.0.0.1", given, count, port=port, wait_s=wait_s)
            weakref.finalize(self, self._registry.end)
            if given is None:
                self._registry.start()

    def end_with(self, code: int, *, again: bool) -> None:
        """Note, before this process ends, its exit code, and whether it will be started again."""
        if self._registry is not None:
            self._registry.ending = code, again

    def _find(self) -> tuple[str, list[Mapping[str, Address]], list[str | None], list[list[Any]]]:
        """Wait for the nodes, on rank 0. Return the secret, and for each node its addresses by worker host, its cluster, and the commits of which
        it has kept units."""
        assert self._registry is not None
        told = self._registry.wait()
        clusters = [node["cluster"] or cluster_of(node["host"], self._hosts) for node in told]
        addresses: list[Mapping[str, Address]] = []
        for number, (node, name) in enumerate(zip(told, clusters, strict=True)):
            own = next((cluster for cluster in self._topology.clusters if cluster.name == name), None)
            near = {} if own is None else near_addresses(own, node["ports"])
            heard = self._registry.listen(number, sorted(set(near.values()))) if near else {}
            for address in heard:
                print(f"optimizer node {number} listens at {address}, too, for workers of cluster {name}", flush=True)
            elsewhere: Address = node["address"]
            addresses.append({EVERYWHERE: elsewhere} | {host: heard[address] for host, address in near.items()})
        return self._registry.secret, addresses, clusters, [node["kept"] for node in told]

    def _meet(self) -> None:
        if not self._addresses:
            self._secret, self._addresses, self._clusters, self._kept = self._ask_rank_0(self._find)

    def have_kept(self, run: str, version: int) -> bool:
        """Return whether all nodes still hold the values that they had when the workers of an earlier start had made ``version - 1`` steps of
        ``run``. All ranks must call."""
        self._meet()
        return all(kept and all(tuple(commit) == (run, version) for commit in kept) for kept in self._kept)

    def kept_values(self) -> dict[str, Tensor]:
        """Fetch all parameters that the nodes have kept, by name, on the CPU. Any rank may call after :meth:`have_kept`.

        Raises:
            ConnectionLostError: a node is gone.
        """
        found: dict[str, Tensor] = {}
        for number in range(len(self._addresses)):
            channel = Channel.connect(
                self._address(number), self._secret, {"kind": "kept"}, peer=f"optimizer node {number}"
            )
            try:
                while "unit" in (said := channel.receive()):
                    views = UnitLayout.from_plain(said["unit"]).views(said["values"])
                    found |= {name: view.clone() for name, view in views.items()}
            finally:
                channel.close()
        return found

    def _address(self, number: int) -> Address:
        """Return the address of a node for this rank's host."""
        addresses = self._addresses[number]
        return addresses.get(self._host, addresses[EVERYWHERE])

    def share(self, clusters: Sequence[str | None]) -> list[list[int]]:
        """Return for each pipeline rank the nodes that hold its stages; ``clusters``: of each pipeline rank. All ranks must call."""
        self._meet()
        return share_nodes(clusters, self._clusters)

    def clusters_of(self, by_rank: Sequence[Sequence[int]]) -> list[list[str | None]]:
        """Return the clusters of the nodes that :meth:`share` has returned; None for nodes whose cluster is not known."""
        return [[self._clusters[number] for number in numbers] for numbers in by_rank]

    def open(
        self,
        units: Mapping[int, UnitLayout],
        place_of: Mapping[int, int],
        optimizer: Mapping[str, Any],
        *,
        pipeline_rank: int,
        clusters: Sequence[str | None],
        num_workers: int,
        worker: int,
        states: str,
        module: str,
        precision: str,
        run: str = "",
        adopt: int = 0,
    ) -> list[NodeLink]:
        """Connect to the nodes of this rank's stages. All ranks must call.

        Args:
            units: the layout of each unit that the nodes hold, by number.
            place_of: for each unit, the index of its node among those that :meth:`share` returns for this rank.
            clusters: for each pipeline rank, the cluster that contains all of its workers, or None.
            states: HolmesStrategy's optimizer_states.
            module: the name of the module's class.
            precision: the Trainer's precision.
            run: a name for this fit's values, under which the nodes keep them when the workers are lost; empty: the nodes do not keep them.
            adopt: the version of the kept values from which the nodes shall continue; 0: the nodes are given values.

        Raises:
            HolmesError: a node cannot be reached, or does not know the optimizer.
        """
        self._num_sessions += 1
        by_rank = self.share(clusters)
        numbers = by_rank[pipeline_rank]
        links = []
        for place, number in enumerate(numbers):
            told = {
                "place": f"pipeline rank {pipeline_rank}",
                "module": module,
                "precision": precision,
                "num_workers": num_workers,
                "units": {i: unit.to_plain() for i, unit in units.items() if place_of[i] == place},
                "optimizer": dict(optimizer),
                "states": states,
                "run": run,
                "adopt": adopt,
                "num_places": sum(number in of_rank for of_rank in by_rank),
            }
            links.append(
                NodeLink(
                    self._address(number),
                    self._secret,
                    session=f"{self._num_sessions}/{pipeline_rank}",
                    worker=worker,
                    told=told,
                    number=number,
                    timeout_s=self._timeout_s,
                )
            )
        return links


def cluster_of(name: str, hosts: Sequence[OptimizerHost]) -> str | None:
    """Return the cluster of the node on host ``name``, compared without domains if no host has exactly this name; None if not known."""
    same = [host.cluster for host in hosts if host.name == name]
    return next(iter(same or [h.cluster for h in hosts if h.name.split(".")[0] == name.split(".")[0]]), None)


def share_nodes(of_ranks: Sequence[str | None], of_nodes: Sequence[str | None]) -> list[list[int]]:
    """Return for each pipeline rank the nodes that hold its stages, from the clusters of both. The nodes of a cluster are shared among the ranks of
    that cluster; ranks of clusters without nodes share the nodes that are in no rank's cluster, or all nodes if there are none."""
    own = {
        c: [n for n, other in enumerate(of_nodes) if other == c] for c in of_ranks if c is not None and c in of_nodes
    }
    rest = [n for n, cluster in enumerate(of_nodes) if cluster not in own] or list(range(len(of_nodes)))
    groups = [cluster if cluster in own else None for cluster in of_ranks]
    found = []
    for rank, cluster in enumerate(groups):
        nodes = rest if cluster is None else own[cluster]
        alike = [r for r, other in enumerate(groups) if other == cluster]
        found.append([nodes[i] for i in nodes_of(alike.index(rank), len(alike), len(nodes))])
    return found


def nodes_of(pipeline_rank: int, num_pipelines: int, num_nodes: int) -> list[int]:
    """Return the nodes that hold the stages of a pipeline rank: with fewer nodes than ranks, ranks share nodes in turn; with more, a rank has
    several."""
    own = [number for number in range(num_nodes) if number % num_pipelines == pipeline_rank]
    return own or [pipeline_rank % num_nodes]


class _Registry:
    """Accepts the nodes' connections on rank 0, and ends the nodes.

    Args:
        wait_s: how long the nodes may take to connect, in seconds.
    """

    def __init__(self, host: str, secret: str, count: int, *, wait_s: float, port: int = 0) -> None:
        self.secret = secret
        self._count, self._wait_s = count, wait_s
        self._nodes: dict[int, tuple[Channel, dict[str, Any]]] = {}
        self._numbers: set[int] = set()
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ending: tuple[int, bool] | None = None
        """This process's exit code, and whether it will be started again, if they are known before it ends; else None."""
        self._listener = Listener(host, secret, "an optimizer node", self._join, port=port)

    def _join(self, channel: Channel, hello: dict[str, Any]) -> None:
        with self._changed:
            number = hello["number"]
            if number < 0 or number in self._numbers:
                number = next(free for free in itertools.count() if free not in self._numbers)
            self._numbers.add(number)
        try:
            channel.send({"number": number, "again": _restarts()})
            told = channel.receive()
        except ConnectionLostError:  # the node that is started in its place gets its number
            with self._changed:
                self._numbers.discard(number)
            return
        with self._changed:
            self._nodes[number] = channel, told
            self._changed.notify_all()

    def start(self) -> None:
        """Start the nodes on this host."""
        host, port = self._listener.address
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
        environment = os.environ | {
            SECRET: self.secret,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        for number in range(self._count):
            command = [python, "-m", "lightning_holmes.optim.node", f"{host}:{port}", str(number), str(self._count)]
            self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def wait(self) -> list[dict[str, Any]]:
        """Wait for all nodes, and return what each has reported: its address, host, cluster and more.

        Raises:
            HolmesError: a node does not connect in time, or has ended.
            ConfigurationError: a node has other versions, or there are too many nodes.
        """
        end = time.monotonic() + self._wait_s
        address = ":".join(map(str, self._listener.address))
        if not self._processes:
            print(f"waiting for {self._count} optimizer nodes at {address}", flush=True)
        with self._changed:
            while len(self._nodes) < self._count:
                ended = [p for p in self._processes if p.poll() is not None]
                if ended or time.monotonic() > end:
                    come = f"{len(self._nodes)} of {self._count} optimizer nodes have come to {address}"
                    why = (
                        f"process {ended[0].pid} ended with code {ended[0].returncode}; what it has printed says why"
                        if ended
                        else f"within {self._wait_s:.0f} s; nodes of other hosts are started by lightning-holmes optimizer-node, with this job's {SECRET}"
                    )
                    self.end(f"{come}: {why}")
                    raise HolmesError(f"{come}: {why}")
                self._changed.wait(0.2)
        self._check_versions()
        if sorted(self._nodes) != list(range(self._count)):
            raise ConfigurationError(
                f"optimizer_nodes={self._count}, but the nodes that have come have the numbers {', '.join(map(str, sorted(self._nodes)))}: "
                f"start {self._count}, or set optimizer_nodes to the number of those that you start"
            )
        return [told for _, (_, told) in sorted(self._nodes.items())]

    def listen(self, number: int, hosts: Sequence[str]) -> dict[str, Address]:
        """Let a node listen at further addresses of its own, and return the full addresses, with ports, by ``hosts``."""
        channel, _ = self._nodes[number]
        channel.send({"listen": list(hosts)})
        found: dict[str, Address] = channel.receive()["addresses"]
        return found

    def _check_versions(self) -> None:
        mine = versions()
        for number, (_, told) in sorted(self._nodes.items()):
            different = [
                f"{key} {told['versions'].get(key)}, here {mine[key]}"
                for key in mine
                if told["versions"].get(key) != mine[key]
            ]
            if different:
                said = f"optimizer node {number} on {told['host']} has {'; '.join(different)}: install the same versions on all hosts"
                self.end(said)
                raise ConfigurationError(said)

    def end(self, why: str = "") -> None:
        """Tell the nodes to end as soon as the other ranks do not need them either, or, if this process will be started again, to wait for
        that. Does not wait for the nodes.

        Args:
            why: what keeps the job from beginning; empty if nothing does.
        """
        self._listener.close()
        # last_value: the exception that ends a process
        failed = bool(why) or getattr(sys, "last_value", None) is not None
        code, again = self.ending or (int(failed), failed and _restarts())
        for channel, _ in self._nodes.values():
            try:
                channel.send({"end": {"code": code, "again": again, "why": why}})
            except HolmesError:
                pass  # the node is gone
            channel.close()
        self._processes.clear()


def _restarts() -> bool:
    """Return whether torchrun will start this job again if it fails."""
    started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(started) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
