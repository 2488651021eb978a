"""Finds the ranks of WORLD that do not reach each other, after WORLD's first use has failed.

Gloo connects WORLD's ranks at their first communication, and says "Timed out waiting for send" on every rank, whichever
two ranks are cut off. So each rank publishes in the job's store where it listens, and tries to connect to its peers
when a rank has failed.

    announce(store, rank=0, host="node-0")
    tell_blocked(store, rank=0, world_size=4)       # on each rank, when FailureWatch calls it
    gather_blocked(store, world_size=4)
    # ["rank 1 on b (eth0 10.0.0.2) does not reach rank 2 on c (eth0 10.0.0.3) at port 40123: timed out"]
"""

import contextlib
import functools
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil

from lightning_holmes.comm.answer import answer_within

_CONNECT_S = 3.0
_ANSWER_S = 10.0  # a rank looks once a second whether it is asked


def announce(store: Any, *, rank: int, host: str) -> None:
    """Publish where this process listens for WORLD; to be called once WORLD has been formed, and before other groups are."""
    ends = []
    with contextlib.suppress(psutil.Error, OSError):
        interfaces = {a.address.split("%")[0]: name for name, own in psutil.net_if_addrs().items() for a in own}
        for end in psutil.Process().net_connections(kind="tcp"):
            # the store, which rank 0 may hold, listens on all addresses
            if end.status == psutil.CONN_LISTEN and end.laddr.ip in interfaces:
                ends.append([interfaces[end.laddr.ip], end.laddr.ip, end.laddr.port])
    store.set(_key("listening", rank), json.dumps([host, ends]))


def tell_blocked(store: Any, *, rank: int, world_size: int) -> None:
    """Try to connect to this rank's peers in WORLD, and publish which ones it does not reach; takes a few seconds at most."""
    if not store.check([_key("listening", rank)]):
        return
    own = _place(store, rank)
    # WORLD's collectives use rings and distances of powers of two
    steps = {1 << power for power in range(world_size.bit_length())}
    peers = sorted({(rank + sign * step) % world_size for step in steps for sign in (1, -1)} - {rank})
    known = [peer for peer in peers if store.check([_key("listening", peer)])]
    ends = [(peer, *end) for peer in known for end in _read(store, peer)[1]]
    with ThreadPoolExecutor(max_workers=max(1, len(ends))) as pool:
        problems = list(pool.map(lambda end: _try(str(end[2]), int(end[3])), ends))
    found = [
        f"rank {rank} {own} does not reach rank {peer} {_place(store, peer)} at port {port}: {problem}"
        for (peer, _, _, port), problem in zip(ends, problems, strict=True)
        if problem is not None
    ]
    store.set(_key("blocked", rank), json.dumps(found))


def gather_blocked(store: Any, *, world_size: int) -> list[str]:
    """One line for each connection that cannot be made, from all ranks that answer within _ANSWER_S seconds.

    Empty if nothing is known, or all connections can be made.
    """
    found: list[str] = []
    deadline = time.monotonic() + _ANSWER_S
    for other in range(world_size):
        left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(Exception):  # a rank that is gone does not answer; stores raise various exceptions
            found += json.loads(answer_within(functools.partial(_read_later, store, other, left), timeout_s=_ANSWER_S))
    return found


def _read_later(store: Any, rank: int, timeout: timedelta) -> Any:
    store.wait([_key("blocked", rank)], timeout)
    return store.get(_key("blocked", rank))


def _key(what: str, rank: int) -> str:
    return f"holmes/{what}/{rank}"


def _read(store: Any, rank: int) -> tuple[str, list[tuple[str, str, int]]]:
    host, ends = json.loads(store.get(_key("listening", rank)))
    return host, ends


def _place(store: Any, rank: int) -> str:
    host, ends = _read(store, rank)
    return f"on {host}" + "".join(f" ({interface} {address})" for interface, address, _ in ends[:1])


def _try(address: str, port: int) -> str | None:
    """Why a connection cannot be made; None if it can."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return os.strerror(error.errno) if error.errno is not None else str(error)
    return None
