"""WORLD, the group of all ranks: on Ethernet, on the interface that reaches the master, whatever other groups use.

Every rank must be able to reach every other one there, which no RDMA fabric that ends at a cluster's border offers.
"""

import contextlib
import os
from collections.abc import Generator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_holmes.comm.user_settings import UserSettings, set_own
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_private import init_dist_connection
from lightning_holmes.torch_private import nccl_options

_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"


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
        interface: the one that reaches the master; None: the library's own choice.
        several_hosts: connections are made only between ranks that talk, and NCCL keeps off RDMA.
        user: what the user has set wins.
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
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if attempt:
            options["store"] = _store_of_attempt(environment, attempt, timeout)
        init_dist_connection(environment, backend, timeout=timeout, **options)


def _store_of_attempt(environment: ClusterEnvironment, attempt: int, timeout: timedelta | None) -> Any:
    """torchrun's store outlives a restart, and with it the addresses of processes that are gone, which whoever is early would
    connect to (torch 2.13): each attempt has keys of its own."""
    given = {} if timeout is None else {"timeout": timeout}
    made = dist.rendezvous("env://", environment.global_rank(), environment.world_size(), **given)  # type: ignore[attr-defined]
    store, _, _ = next(made)
    if timeout is not None:
        store.set_timeout(timeout)
    return dist.PrefixStore(f"holmes/attempt{attempt}", store)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Set variables for a while; those that are set already stay."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def without_interfaces() -> Generator[None, None, None]:
    """As if the user had named no interfaces; for a rank that refuses those, and still has to say so to the others."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


def check_port_range(port_range: tuple[int, int], path: str = _PORTS) -> None:
    """Whether gloo and NCCL will keep to the ports that a firewall leaves open.

    Both let the kernel choose the ports of their listeners, so it is the kernel's range that must lie within.

    Raises:
        ConfigurationError: it does not; the message has the command that mends it.
    """
    first, last = port_range
    try:
        low, high = (int(part) for part in Path(path).read_text().split())
    except (OSError, ValueError):
        return  # another system; nothing to compare with
    if low < first or high > last:
        raise ConfigurationError(
            f"port_range={first}-{last}, but the kernel of this host gives listeners of gloo and NCCL the ports {low} to "
            f'{high} ({path}); narrow it: sysctl -w net.ipv4.ip_local_port_range="{first} {last}"'
        )
