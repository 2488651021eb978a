"""Discovers the topology of a job: all ranks send their inventories through the store, and rank 0 decides.

Every rank puts its inventory into the job's store as JSON. Rank 0 groups the hosts, has one rank of each host
(the lowest, the host's agent) test and measure connections, and puts the topology into the store, from which all other
ranks read it, so that all have the same. A rank that does not answer is named after a timeout; an error of one rank is raised on all.

    topology = discover_topology(store, rank, world_size)     # every rank must call it, in the same order
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from lightning_holmes.cluster.fabric import NicEnd, group_hosts
from lightning_holmes.cluster.hardware import HostInventory, probe_host
from lightning_holmes.cluster.live_host import LiveHost, merge_ranks
from lightning_holmes.cluster.live_nics import with_live_nics
from lightning_holmes.cluster.measure import choose_pairs, schedule, with_speeds
from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.probe import Endpoint, Listener, ProbeResult, ProbeTask, run_tasks
from lightning_holmes.cluster.record import read_json, record, to_json
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError, RemoteError

_ROUNDS = 8  # rounds of connection tests; each splits off one more fabric from those that look the same
_ANSWER_S = 12.0  # seconds that a round may take in addition to its tasks


T = TypeVar("T")


class Store(Protocol):
    """The methods of torch's c10d stores (TCPStore, HashStore, PrefixStore) that discovery uses."""

    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message between ranks: an error, or the content for its key. An empty message: no role for the rank, or no more tasks.

    Attributes:
        inventory: of a rank.
        host, token: for the rank that is the agent of its host.
        endpoints, warnings: of an agent's listener.
        tasks, results: of a step.
        topology: decided by rank 0.
    """

    error: str | None = None
    inventory: HostInventory | None = None
    host: str | None = None
    token: str | None = None
    endpoints: tuple[Endpoint, ...] | None = None
    warnings: tuple[str, ...] = ()
    tasks: tuple[ProbeTask, ...] | None = None
    results: tuple[ProbeResult, ...] | None = None
    topology: Topology | None = None


class _Board:
    """A job's store for one discovery, with its own key prefix, a common deadline, and errors that name ranks."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        # all ranks call discovery in the same order, so that each counts its own calls and all get the same number
        number = store.add(f"holmes/discoveries/{rank}", 1)
        self._store = store
        self._prefix = f"holmes/discovery/{number}/"
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        # rank 0 names the missing ranks at its deadline; the other ranks wait a little longer for its message
        self.deadline = time.monotonic() + timeout_s + (_ANSWER_S if rank else 0)

    def put(self, key: str, **content: Any) -> None:
        self._store.set(self._prefix + key, to_json(_Message(**content)))

    def put_error(self, key: str, error: BaseException) -> None:
        self.put(key, error=f"{type(error).__name__}: {error}"[:4000])

    def get(self, key: str, *, who: str) -> _Message:
        """Wait for the message of a key. Raises RemoteError, which names ``who``, on a timeout or if the message is an error."""
        if not self.wait([key], self.deadline - time.monotonic()):
            raise RemoteError(f"{who} did not answer within {self.timeout_s:g} s while the clusters were being found")
        message = read_json(_Message, self._store.get(self._prefix + key), source=who)
        if message.error is not None:
            raise RemoteError(f"{who} failed while the clusters were being found: {message.error}")
        return message

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait for keys; return whether all were set in time."""
        names = [self._prefix + key for key in keys]
        try:
            self._store.wait(names, timedelta(seconds=max(seconds, 0.01)))
        except Exception:  # stores raise different errors: DistStoreError, RuntimeError, LookupError
            return self._store.check(names)
        return True

    def has(self, key: str) -> bool:
        return self._store.check([self._prefix + key])


def discover_topology(
    store: Store,
    rank: int,
    world_size: int,
    *,
    local: HostInventory | None = None,
    given: Topology | None = None,
    connects: bool = True,
    measures: bool = True,
    timeout_s: float = 120.0,
) -> Topology:
    """Discover the topology, the same on every rank. All ranks must call this, with the same arguments except ``local``.

    Args:
        store: the job's c10d store.
        local: this host's inventory; default :func:`probe_host`.
        given: a topology from a file, which defines hosts and clusters; it is matched to the hosts of the job.
        connects: test connections; without it only hints are used, no port is opened, and nothing is measured.
        measures: measure speeds.
        timeout_s: the time limit for answers of other ranks.

    Raises:
        RemoteError: a rank failed or did not answer; the message names it.
        ConfigurationError: the topology file does not match the job's hosts, or no port of the range is free.
    """
    board = _Board(store, rank, world_size, timeout_s)
    try:
        mine = local if local is not None else probe_host(master_addr=numeric_address(None))
        board.put(f"inventory/{rank}", inventory=mine)
    except Exception as error:
        board.put_error(f"inventory/{rank}", error)
        raise
    if rank != 0:
        return _follow(board, mine)
    try:
        topology = _Leader(board, mine, connects=connects, measures=measures).decide(given)
    except BaseException as error:
        board.put_error("end", error)
        raise
    else:
        board.put("end", topology=topology)
    finally:
        for follower in range(1, world_size):
            if not board.has(f"role/{follower}"):
                board.put(f"role/{follower}")
    return topology


def _gather_inventories(board: _Board) -> list[HostInventory]:
    keys = [f"inventory/{rank}" for rank in range(board.world_size)]
    if not board.wait(keys, board.deadline - time.monotonic()):
        missing = [rank for rank, key in enumerate(keys) if not board.has(key)]
        shown = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise RemoteError(
            f"no answer within {board.timeout_s:g} s from rank {shown} while the clusters were being found: "
            "are these processes running, and do all of them use strategy='holmes'?"
        )
    return [
        _given(board.get(key, who=f"rank {rank}").inventory, "inventory", f"rank {rank}")
        for rank, key in enumerate(keys)
    ]


def _given(content: T | None, what: str, who: str) -> T:
    if content is None:
        raise ConfigurationError(f"{who}: its message has no {what!r}")
    return content


# The agents' side


def _follow(board: _Board, mine: HostInventory) -> Topology:
    role = board.get(f"role/{board.rank}", who="rank 0")
    if role.host is not None:
        try:
            agent = _Agent(board, mine, role.host, _given(role.token, "token", "rank 0"))
            with contextlib.closing(agent):
                agent.obey()
        except Exception as error:
            board.put(f"endpoints/{board.rank}", error=f"{error}"[:2000])
            raise
    return _given(board.get("end", who="rank 0").topology, "topology", "rank 0")


class _Agent:
    """The rank that opens listeners and runs tasks for its host."""

    def __init__(self, board: _Board, mine: HostInventory, host: str, token: str) -> None:
        self._board = board
        self._token = bytes.fromhex(token)
        self._listener = Listener(host=host, nics=mine.nics(), token=self._token)
        opened = self._listener.endpoints
        board.put(f"endpoints/{board.rank}", endpoints=opened, warnings=tuple(self._listener.warnings))

    def close(self) -> None:
        self._listener.close()

    def obey(self) -> None:
        """Run the tasks of rank 0 until it sends an empty message."""
        step = 0
        while (tasks := self._board.get(f"step/{step}/{self._board.rank}", who="rank 0").tasks) is not None:
            self.perform(step, tasks)
            step += 1

    def perform(self, step: int, tasks: Sequence[ProbeTask]) -> None:
        """Run tasks and put their results into the store."""
        results = run_tasks(tasks, token=self._token)
        self._board.put(f"result/{step}/{self._board.rank}", results=tuple(results))


# Rank 0's side


class _Leader:
    """Rank 0: gathers inventories, groups hosts, and has connections tested and measured."""

    def __init__(self, board: _Board, mine: HostInventory, *, connects: bool, measures: bool) -> None:
        self._board = board
        self._mine = mine
        self._connects, self._measures = connects, measures
        self._step = 0
        self._agents: dict[str, int] = {}
        self._endpoints: dict[str, tuple[Endpoint, ...]] = {}
        self._own: _Agent | None = None
        self._warnings: list[str] = []

    def decide(self, given: Topology | None) -> Topology:
        inventories = _gather_inventories(self._board)
        hosts = merge_ranks(inventories)
        try:
            if self._connects and len(hosts) > 1:
                self._appoint_agents(hosts)
            if given is not None:
                by_rank = {rank: host.name for host in hosts for rank in host.ranks}
                topology = given.with_ranks([by_rank[rank] for rank in range(len(inventories))])
                by_name = {host.name: host for host in hosts}
                live = {name: by_name[other] for name, other in _live_names(topology, hosts).items()}
                topology = with_live_nics(topology, live)
            else:
                topology = self._group(inventories)
            topology = replace(topology, warnings=(*topology.warnings, *self._warnings))
            return self._with_speeds(topology, hosts)
        finally:
            for rank in self._agents.values():
                if rank != 0:
                    self._board.put(f"step/{self._step}/{rank}")
            if self._own is not None:
                self._own.close()

    def _appoint_agents(self, hosts: Sequence[LiveHost]) -> None:
        token = secrets.token_hex(32)
        self._agents = {host.name: min(host.ranks) for host in hosts}
        by_rank = {rank: name for name, rank in self._agents.items()}
        for rank in range(1, self._board.world_size):
            self._board.put(f"role/{rank}", **({"host": by_rank[rank], "token": token} if rank in by_rank else {}))
        self._own = _Agent(self._board, self._mine, by_rank[0], token)
        for name, rank in self._agents.items():
            who = f"rank {rank} on host {name}"
            opened = self._board.get(f"endpoints/{rank}", who=who)
            endpoints = _given(opened.endpoints, "endpoints", who)
            self._endpoints[name] = tuple(replace(endpoint, host=name) for endpoint in endpoints)
            self._warnings += [f"{name}: {warning}" for warning in opened.warnings]

    def _group(self, inventories: Sequence[HostInventory]) -> Topology:
        known: dict[tuple[NicEnd, NicEnd], bool | None] = {}
        nics = {(host.name, nic.name): nic for host in merge_ranks(inventories) for nic in host.inventory.nics()}
        for _ in range(_ROUNDS):
            asked: list[tuple[NicEnd, NicEnd]] = []

            def reachable(one: NicEnd, other: NicEnd, asked: list[tuple[NicEnd, NicEnd]] = asked) -> bool | None:
                if (one, other) not in known:
                    asked.append((one, other))
                return known.get((one, other))

            topology = group_hosts(inventories, reachable=reachable)
            tasks = {}
            for one, other in asked if self._agents else ():
                task = self._task(other.host, nics[other.host, other.nic], one.host, nics[one.host, one.nic])
                known[one, other] = None  # stays None if it cannot be tested
                if task is not None:
                    tasks[one, other] = task
            if not tasks:
                return topology
            results = self._run(list(tasks.values()))
            for pair, result in zip(tasks, results, strict=True):
                known[pair] = result.error is None
        return topology

    def _with_speeds(self, topology: Topology, hosts: Sequence[LiveHost]) -> Topology:
        if not (self._measures and self._agents):
            return with_speeds(topology, [], {})
        live = _live_names(topology, hosts)
        candidates = []
        for pair in choose_pairs(topology):
            (one, other), (nic, target) = pair.hosts, pair.nics
            task = self._task(live[one], nic, live[other], target)
            if task is not None:
                candidates.append((pair, task))
        # latency first, of all pairs at once, since that is little traffic; pairs without an answer are not measured further
        latencies = self._run([task for _, task in candidates])
        alive = [(p, t, r) for (p, t), r in zip(candidates, latencies, strict=True) if r.error is None]
        slots, seconds, interval = schedule([pair for pair, _, _ in alive])
        tasks = [
            replace(task, seconds=seconds, start_s=slot * interval)
            for (_, task, _), slot in zip(alive, slots, strict=True)
        ]
        results = {pair.key: latency for (pair, _), latency in zip(candidates, latencies, strict=True)}
        for (pair, _, latency), result in zip(alive, self._run(tasks), strict=True):
            results[pair.key] = replace(result, latency_s=latency.latency_s)
        return with_speeds(topology, [pair for pair, _ in candidates], results)

    def _task(self, host: str, nic: Nic, target_host: str, target: Nic) -> ProbeTask | None:
        """Make a task from a NIC to an endpoint of another NIC, over a common IP version, preferably IPv4; None if there is none."""
        for endpoint in self._endpoints.get(target_host, ()):
            if endpoint.address not in target.addresses:
                continue
            for address in nic.addresses:
                if nic.up and (":" in address) == (":" in endpoint.address):
                    return ProbeTask(
                        source_host=host,
                        source_nic=nic.name,
                        source_address=address,
                        source_interface=nic.interface if nic.interface != "lo" else None,
                        target=endpoint,
                    )
        return None

    def _run(self, tasks: Sequence[ProbeTask]) -> list[ProbeResult]:
        """Have agents run tasks; the tasks of an agent that does not answer have failed."""
        if not tasks:
            return []
        step, self._step = self._step, self._step + 1
        by_rank: dict[int, list[int]] = {rank: [] for rank in self._agents.values()}
        for index, task in enumerate(tasks):
            by_rank[self._agents[task.source_host]].append(index)
        for rank, mine in by_rank.items():
            if rank != 0:
                self._board.put(f"step/{step}/{rank}", tasks=tuple(tasks[index] for index in mine))
        longest = max(task.start_s + task.seconds for task in tasks)
        end = time.monotonic() + longest + _ANSWER_S
        assert self._own is not None
        self._own.perform(step, [tasks[index] for index in by_rank[0]])
        results: dict[int, ProbeResult] = {}
        for rank, mine in by_rank.items():
            if not mine:
                continue
            key, who = f"result/{step}/{rank}", f"rank {rank} on host {tasks[mine[0]].source_host}"
            if not self._board.wait([key], end - time.monotonic()):
                why = f"{who} did not answer within {longest + _ANSWER_S:g} s"
                results.update((index, ProbeResult(error=why)) for index in mine)
                continue
            given = _given(self._board.get(key, who=who).results, "results", who)
            if len(given) != len(mine):
                raise ConfigurationError(f"{who}: {len(mine)} results were expected")
            results.update(zip(mine, given, strict=True))
        return [results[index] for index in range(len(tasks))]


def _live_names(topology: Topology, hosts: Sequence[LiveHost]) -> dict[str, str]:
    """For each host of a topology with ranks, the name of the live host that has its ranks."""
    by_rank = {rank: host.name for host in hosts for rank in host.ranks}
    return {host.name: by_rank[topology.ranks_of_host(host.name)[0]] for host in topology.hosts}


def numeric_address(master_addr: str | None) -> str | None:
    """The numeric address of the master (default: MASTER_ADDR). Fast, since the launcher has already looked the name up."""
    name = master_addr or os.environ.get("MASTER_ADDR")
    if not name:
        return None
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
