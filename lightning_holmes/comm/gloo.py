"""Gloo groups on a network interface of one's choice, all groups of an interface on one device.

Gloo ignores ``new_group(pg_options=)`` and picks one interface for the whole process. A registered backend is
given what it needs: the device. Sharing it matters, too: each device keeps a thread that wakes a hundred times
a second, and the groups of a rank are many.

    devices = GlooDevices()
    group = dist.new_group(ranks, backend=GLOO, pg_options=devices.on("eth1"))
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_holmes.errors import ConfigurationError, UnreachableError
from lightning_holmes.torch_private import gloo_device, gloo_group, is_backend_registered

GLOO = "holmes_gloo"
_CONNECT = timedelta(seconds=60)  # who cannot be reached in this time will not be


@dataclass(frozen=True, slots=True)
class GlooOptions:
    """What the backend is told of a group: the device its connections are made on, and for messages its ends."""

    device: Any
    ends: str = ""


class GlooDevices:
    """The gloo devices of a process, one for each interface that is used."""

    def __init__(self) -> None:
        self._made: dict[str | None, Any] = {}
        register()

    def on(self, interface: str | None, ends: str = "") -> GlooOptions:
        """Options for a group on ``interface``; None: the one gloo chooses, or GLOO_SOCKET_IFNAME.

        ``ends``: who is to be connected, for the message if that fails.

        Raises:
            ConfigurationError: the interface cannot be listened on.
        """
        if interface not in self._made:
            try:
                self._made[interface] = gloo_device(interface)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"gloo cannot use the network interface {interface or 'that it chose by itself'}: {error}. Is it up "
                    f"and has it an address? `lightning-holmes topology` lists the interfaces of this host"
                ) from error
        return GlooOptions(self._made[interface], ends)


def register() -> None:
    """Make the backend known to torch; again and again does no harm."""
    if not is_backend_registered(GLOO):
        dist.Backend.register_backend(GLOO, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, given: GlooOptions) -> Any:
    try:
        return gloo_group(
            options.store, options.group_rank, options.group_size, given.device, options.timeout, connect=_CONNECT
        )
    except RuntimeError as error:
        raise UnreachableError(
            f"a group of {options.group_size} ranks cannot be connected{given.ends and ': ' + given.ends}. gloo says: "
            f"{str(error).splitlines()[0]}. If a firewall lies between them, open the ports and give port_range; "
            f"`lightning-holmes topology` under torchrun tries every connection"
        ) from error
