"""WORLD, the group of all ranks: on the Ethernet interface that reaches the master, whatever cards other groups use.

Every rank must be able to reach every other one in WORLD, which no RDMA fabric that ends at a cluster's border offers.
"""

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import default_pg_timeout

from lightning_holmes.comm.user_settings import UserSettings, set_own
from lightning_holmes.errors import ConnectionLostError
from lightning_holmes.lightning_package import fabric
from lightning_holmes.lightning_private import init_dist_connection
from lightning_holmes.torch_private import nccl_options

_BACKLOG = 4096  # ranks that connect at once, as the kernel allows
_PROPOSED = "holmes/meeting"
_PAUSE_S, _LONGER_PAUSE_S = 0.01, 0.1
_FAREWELL_S = 1.0  # the others look more often
_PATIENCE_S = 20.0


def connect_world(
    environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
    backend: str,
    *,
    interface: str | None,
    several_hosts: bool,
    user: UserSettings,
    timeout: timedelta | None,
) -> None:
    """Form WORLD. Every rank must call.

    Args:
        interface: the interface that reaches the master; None: the library chooses.
        several_hosts: the job has several hosts: connections are made only between ranks that communicate, and NCCL
            does not use RDMA.
        user: the user's settings, which take precedence.
    """
    variables: dict[str, str] = {}
    options: dict[str, Any] = {}
    if backend == "gloo" and several_hosts:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
        if interface is not None and user.get("GLOO_SOCKET_IFNAME") is None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    if backend == "nccl" and several_hosts:
        if interface is not None and user.get("NCCL_SOCKET_IFNAME") is None:
            set_own({"NCCL_SOCKET_IFNAME": f"={interface}"})  # read once, by the first communicator
        if user.get("NCCL_NET") is None:
            options["pg_options"] = nccl_options("Socket")
    with _environment(variables):
        if not dist.is_initialized():
            options["store"] = _join_store(environment, timeout, several_hosts=several_hosts)
        init_dist_connection(environment, backend, timeout=timeout, **options)


def _join_store(
    environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
    timeout: timedelta | None,
    *,
    several_hosts: bool,
) -> Any:
    """The job's store once all ranks have come to it, with keys of its own for each attempt: torchrun's store outlives a
    restart, and with it the addresses of processes that are gone, to which early ranks would connect (torch 2.13).

    All ranks must call.

    Raises:
        ConnectionLostError: not all ranks have come in time.
    """
    rank, size = environment.global_rank(), environment.world_size()
    given = {} if timeout is None else {"timeout": timeout}
    limit_s = (timeout or default_pg_timeout).total_seconds()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        made = dist.rendezvous("env://", rank, size, **given)  # type: ignore[attr-defined]
        store, _, _ = next(made)
    else:
        try:
            store = _keep_store(environment, limit_s, several_hosts=several_hosts) if rank == 0 else None
            store = store or _tcp_store(environment, limit_s, rank == 0)
        except dist.DistError as error:
            raise ConnectionLostError(
                f"rank {rank} does not reach the job's store at {environment.main_address}:{environment.main_port} within the timeout "
                f"(HolmesStrategy(timeout=...)): rank 0, which keeps it, has not started, or a firewall closes the port. torch "
                f"says: {str(error).splitlines()[0]}"
            ) from error
    store.set_timeout(timedelta(seconds=limit_s))
    attempt = meet_in_store(store, rank, size, timeout_s=limit_s)
    return dist.PrefixStore(f"holmes/attempt/{attempt}", store)  # type: ignore[attr-defined]


def _tcp_store(
    environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
    timeout_s: float,
    keeps: bool,
    listener: int | None = None,
) -> Any:
    """A store that this process ``keeps``, on the socket ``listener`` if there is one, or a client of it."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        environment.main_address,
        environment.main_port,
        environment.world_size(),
        keeps,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # meet_in_store knows who is missing
        multi_tenant=True,
        master_listen_fd=listener,
    )


def meet_in_store(store: Any, rank: int, size: int, *, timeout_s: float) -> str:
    """Agree on a name that all present ranks get, and none has got before. All ranks must call.

    torchrun counts restarts on each host separately: a host that has joined later has another number. So rank 0
    proposes a name, the others write their own ids under it, and it holds once all have: what ranks that are gone have
    left in the store answers no new proposal. Ranks that do not come are named by rank 0 after _PATIENCE_S seconds, and
    by all at the end.

    Raises:
        ConnectionLostError: not all ranks have come in time.
    """
    own = uuid.uuid4().hex
    began, told = time.monotonic(), False
    end, answered = began + timeout_s, ""
    absent = "rank 0"
    while True:
        if rank == 0:
            others = {other: f"holmes/meeting/{own}/{other}" for other in range(1, size)}
            missing = [str(other) for other, key in others.items() if not store.check([key])]
            if not missing:
                store.set(f"holmes/meeting/{own}/all", " ".join(store.get(key).decode() for key in others.values()))
                return own
            absent = f"rank {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"
            store.set(_PROPOSED, own)
        elif store.check([_PROPOSED]):
            proposed = store.get(_PROPOSED).decode()
            answer, everyone = f"holmes/meeting/{proposed}/{rank}", f"holmes/meeting/{proposed}/all"
            if store.check([everyone]):
                if own in store.get(everyone).decode().split():
                    return str(proposed)
            elif store.check([f"holmes/meeting/{proposed}/failed"]):
                raise ConnectionLostError(store.get(f"holmes/meeting/{proposed}/failed").decode())
            elif (
                proposed != answered
            ):  # rank 0 may have come later: it is the one that ends the waiting, and says who is missing
                store.set(answer, own)
                end, answered = time.monotonic() + timeout_s + _FAREWELL_S, proposed
        waited_s = time.monotonic() - began
        if time.monotonic() > end:
            words = (
                f"{absent} has not come to the job's store within the timeout (HolmesStrategy(timeout=...)): not all {size} ranks "
                f"have been started, or some have ended or cannot reach the store"
            )
            if rank == 0:
                store.set(f"holmes/meeting/{own}/failed", words)
                time.sleep(_FAREWELL_S)  # the store ends with this process
            raise ConnectionLostError(words)
        if rank == 0 and not told and waited_s > _PATIENCE_S:
            told = True
            print(f"[rank 0] has waited for {waited_s:.0f} s: {absent} has not joined", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S if waited_s < 1 else _LONGER_PAUSE_S)


def _keep_store(
    environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
    timeout_s: float,
    *,
    several_hosts: bool,
) -> Any:
    """The job's store on rank 0, which listens only on the master's address; torch's listens on all addresses of the host.

    None if that cannot be: the address is none of this host's own but leads to it, it is a name that means this host's
    loopback here and something else on others, or the process keeps a store at this port already.
    """
    address = _ipv4(environment.main_address)
    if address is None or (several_hosts and address.startswith("127.")):
        return None
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, environment.main_port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return _tcp_store(environment, timeout_s, True, listener.detach())


def _ipv4(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Set variables inside; those that are set already keep their values."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def without_interfaces() -> Generator[None, None, None]:
    """Inside, the environment names no interfaces of the user's: for a rank that refuses them, and still has to tell the others."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)
