"""WORLD, the group of all ranks: on the Ethernet interface that reaches the master, whatever cards other groups use.

Every rank must be able to reach every other one in WORLD, which no RDMA fabric that ends at a cluster's border offers.
"""

import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_holmes.comm.user_settings import UserSettings, set_own
from lightning_holmes.errors import ConnectionLostError
from lightning_holmes.lightning_private import init_dist_connection
from lightning_holmes.torch_private import nccl_options

_BACKLOG = 4096  # ranks that connect at once, as the kernel allows
_TORCHS_PREFIX = "default_pg"  # of the other ranks' keys; init_process_group adds none to a store that it is given
_PROPOSED = "holmes/meeting"
_PAUSE_S = 0.01


def connect_world(
    environment: ClusterEnvironment,
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
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            options["store"] = _store_of_attempt(environment, timeout)
        elif environment.global_rank() == 0:
            kept = _keep_store(environment, timeout, several_hosts=several_hosts)
            options |= {} if kept is None else {"store": kept}
        init_dist_connection(environment, backend, timeout=timeout, **options)


def _store_of_attempt(environment: ClusterEnvironment, timeout: timedelta | None) -> Any:
    """The job's store, with keys of its own for each attempt: torchrun's store outlives a restart, and with it the
    addresses of processes that are gone, to which early ranks would connect (torch 2.13). All ranks must call."""
    rank, size = environment.global_rank(), environment.world_size()
    given = {} if timeout is None else {"timeout": timeout}
    made = dist.rendezvous("env://", rank, size, **given)  # type: ignore[attr-defined]
    store, _, _ = next(made)
    if timeout is not None:
        store.set_timeout(timeout)
    attempt = meet_in_store(store, rank, size, timeout_s=math.inf if timeout is None else timeout.total_seconds())
    return dist.PrefixStore(f"holmes/attempt/{attempt}", store)  # type: ignore[attr-defined]


def meet_in_store(store: Any, rank: int, size: int, *, timeout_s: float) -> str:
    """Agree on a name that all present ranks get, and none has got before. All ranks must call.

    torchrun counts restarts on each host separately: a host that has joined later has another number. So rank 0
    proposes a name, the others write their own ids under it, and it holds once all have: what ranks that are gone have
    left in the store answers no new proposal.

    Raises:
        ConnectionLostError: not all ranks have come in time.
    """
    own = uuid.uuid4().hex
    end = time.monotonic() + timeout_s
    if rank == 0:
        others = [f"holmes/meeting/{own}/{other}" for other in range(1, size)]
        while missing := [str(other) for other, key in enumerate(others, start=1) if not store.check([key])]:
            store.set(_PROPOSED, own)
            _wait_until(end, f"not all ranks have come to the job's store: rank {', '.join(missing[:8])} did not,")
        store.set(f"holmes/meeting/{own}/all", " ".join(store.get(key).decode() for key in others))
        return own
    while True:
        if store.check([_PROPOSED]):
            proposed = store.get(_PROPOSED).decode()
            answer, everyone = f"holmes/meeting/{proposed}/{rank}", f"holmes/meeting/{proposed}/all"
            if store.check([everyone]):
                if own in store.get(everyone).decode().split():
                    return str(proposed)
            else:
                store.set(answer, own)
        _wait_until(end, "rank 0 has not come to the job's store, or not all others have (then rank 0 names them),")


def _wait_until(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise ConnectionLostError(f"{what} within the timeout (HolmesStrategy(timeout=...))")
    time.sleep(_PAUSE_S)


def _keep_store(environment: ClusterEnvironment, timeout: timedelta | None, *, several_hosts: bool) -> Any:
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
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environment.main_address,
        environment.main_port,
        environment.world_size(),
        True,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        **given,
    )
    return dist.PrefixStore(_TORCHS_PREFIX, store)  # type: ignore[attr-defined]


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
