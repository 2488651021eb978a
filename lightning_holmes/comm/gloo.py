"""Gloo groups on a chosen network interface; all groups of an interface share one device.

Gloo ignores ``new_group(pg_options=)`` and picks one interface for the whole process. The backend that is registered
here is given the device. Sharing the device matters, too: each device keeps a thread that wakes a hundred times a
second, and a rank has many groups.

    devices = GlooDevices()
    group = dist.new_group(ranks, backend=GLOO, pg_options=devices.on("eth1"))
    wait_for(dist.isend(tensor, 1, group=group), group)
"""

import contextlib
import re
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from lightning_holmes.comm.job_store import answer_within, is_gone
from lightning_holmes.errors import ConfigurationError, UnreachableError
from lightning_holmes.torch_private import gloo_device, gloo_group, gloo_timeout, is_backend_registered

GLOO = "holmes_gloo"
_ANSWER_S = 5.0
_PAUSE_S = 0.2
_CONNECT = timedelta(seconds=60)  # a rank that cannot be reached in this time counts as unreachable
_LIMITS: "weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta | None]" = weakref.WeakKeyDictionary()
"""By group, the timeout of its operations, read from torch once; None: the group applies its timeout itself."""


@dataclass(frozen=True, slots=True)
class GlooOptions:
    """A group's options for the backend: the devices of its connections, and its ends in words for messages."""

    devices: tuple[Any, ...]
    ends: str = ""


class GlooDevices:
    """The gloo devices of a process, one for each interface that is used."""

    def __init__(self) -> None:
        self._made: dict[str | None, Any] = {}
        register()

    def on(self, interface: str | None, ends: str = "") -> GlooOptions:
        """Options for a group on ``interface``, or on several, joined by commas as in GLOO_SOCKET_IFNAME; None: the one
        that gloo finds by the host's name.

        ``ends``: the members in words, for the error if they cannot be connected.

        Raises:
            ConfigurationError: gloo cannot listen on the interface.
        """
        names = [None] if interface is None else interface.split(",")
        return GlooOptions(tuple(self._device(name) for name in names), ends)

    def _device(self, interface: str | None) -> Any:
        if interface not in self._made:
            try:
                self._made[interface] = gloo_device(interface)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"gloo cannot use the network interface {interface or 'that it chose by itself'}: {error}. Is it up "
                    f"and has it an address? `lightning-holmes topology` lists the interfaces of this host"
                ) from error
        return self._made[interface]


def register() -> None:
    """Register the backend with torch; may be called again."""
    if not is_backend_registered(GLOO):
        dist.Backend.register_backend(GLOO, _create, extended_api=True, devices=["cpu"])


def wait_for(work: Any, group: dist.ProcessGroup | None) -> None:
    """Wait for a send, a receive or a collective of any backend, no longer than the group's timeout.

    Works of gloo use the timeout with which the group was connected (torch 2.13), unless ``wait`` is given one. For
    works of NCCL a timeout would block the host.
    """
    limit = None if group is None else _limit(group)
    if limit is None:
        work.wait()
        return
    try:
        work.wait(limit)
    except RuntimeError as error:
        if not str(error).startswith("Operation timed out"):
            raise
        # the wording for gloo's sends and receives; for a collective torch does not say how long the timeout was
        raise RuntimeError(f"Timed out waiting {limit // timedelta(milliseconds=1)}ms for a collective") from error


def _limit(group: dist.ProcessGroup) -> timedelta | None:
    if group not in _LIMITS:
        _LIMITS[group] = gloo_timeout(group) if dist.get_backend(group) == GLOO else None
    return _LIMITS[group]


def _create(options: Any, given: GlooOptions) -> Any:
    try:
        return gloo_group(
            options.store, options.group_rank, options.group_size, given.devices, options.timeout, connect=_CONNECT
        )
    except RuntimeError as error:
        raise UnreachableError(
            f"a group of {options.group_size} ranks cannot be connected{given.ends and ': ' + given.ends}. gloo says: "
            f"{_what_all_say(options, given.ends, str(error))}. If a firewall lies between them, open the ports that sysctl net.ipv4.ip_local_port_range shows; "
            f"`lightning-holmes topology` under torchrun tries every connection"
        ) from error


def _what_all_say(options: Any, ends: str, message: str) -> str:
    """The error of gloo on each member of a group, and where each listens: gloo's own message often names no address."""
    mine = re.sub(r"\[/\S*?/(\w+\.\w+:\d+)\]", r"[\1]", message.splitlines()[0])
    listening = _listening_addresses(ends)
    if listening:
        mine += f" (it listens on {', '.join(listening)})"
    said = {options.group_rank: mine}
    store, asked = options.store, set(range(options.group_size))

    def ask() -> None:
        time.sleep(_PAUSE_S)  # an ending process loses its connections one by one, and may keep the store
        if not is_gone(store):
            store.set(f"unreachable/{options.group_rank}", mine)
        deadline = time.monotonic() + _ANSWER_S
        while asked > said.keys() and time.monotonic() < deadline and not is_gone(store):
            for rank in asked - said.keys():
                if store.check([f"unreachable/{rank}"]):  # a rank that has connected writes nothing
                    said[rank] = store.get(f"unreachable/{rank}").decode()
            time.sleep(_PAUSE_S)

    with contextlib.suppress(Exception):  # stores raise various exceptions
        answer_within(ask, timeout_s=2 * _ANSWER_S)
    return "; ".join(f"(member {rank}) {text}" for rank, text in sorted(said.items()))


def _listening_addresses(ends: str) -> list[str]:
    """Addresses and ports on which this process listens for one of the cards in ``ends``."""
    with contextlib.suppress(psutil.Error, OSError):
        sockets = psutil.Process().net_connections(kind="tcp")
        return [
            f"{s.laddr.ip}:{s.laddr.port}"
            for s in sockets
            if s.status == psutil.CONN_LISTEN and re.search(rf"(?<![\d.]){re.escape(s.laddr.ip)}(?![\d.])", ends)
        ]
    return []
