"""UserSettings: what the user has set for NCCL and gloo by the libraries' own variables, and how these are read.

It handles the variables' syntax and who set them; group_transports.py decides what follows for a group.

    user = UserSettings.read()
    user.get("NCCL_NET")                            # "Socket", or None
    user.check_interfaces("nccl", host="node-0", interfaces=local_interfaces())    # raises if no interface matches
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lightning_holmes.errors import ConfigurationError

# Read by NCCL in this order, the first one from NCCL_CONF_FILE where that is set (NCCL 2.23); an environment variable wins
# over both (NCCL's documentation, "Environment Variables").
_NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")
_OWN = "HOLMES_SET_"  # prefix of a variable's name, for the value that this package has set
_WATCHED = ("GLOO_SOCKET_IFNAME", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")


@dataclass(frozen=True, slots=True)
class UserSettings:
    """The user's settings for the communication libraries: by variable, the value and its source."""

    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, files: Sequence[str] = _NCCL_FILES) -> UserSettings:
        """Read the settings from the environment, and for NCCL also from its configuration files."""
        environment = os.environ if environment is None else environment
        values: dict[str, tuple[str, str]] = {}
        own_file = environment.get("NCCL_CONF_FILE")
        for name in (own_file, *files[1:]) if own_file else files:
            path = Path(name).expanduser()
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                found = re.match(r"\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", line)
                if found and found[1] in _WATCHED and found[2]:
                    values.setdefault(found[1], (found[2], str(path)))
        for variable in _WATCHED:
            # what an earlier run of this process has set is not the user's
            if environment.get(variable) and environment[variable] != environment.get(_OWN + variable):
                values[variable] = (environment[variable], "the environment")
        return cls(values)

    def get(self, variable: str) -> str | None:
        """The value of a variable, or None."""
        return self.values[variable][0] if variable in self.values else None

    def describe(self, variable: str) -> str:
        """The setting with its source, for messages."""
        value, place = self.values[variable]
        return f"{variable}={value} in {place}"

    def check_interfaces(self, backend: str, *, host: str, interfaces: Sequence[str]) -> None:
        """Refuse interfaces that do not exist. ``interfaces``: those of this host that have an IP address.

        Raises:
            ConfigurationError: GLOO_SOCKET_IFNAME names one that is not among them, or NCCL_SOCKET_IFNAME matches none of them.
        """
        for variable in socket_variables(backend):
            setting = self.get(variable)
            if setting is None:
                continue
            found = named_interfaces(variable, setting, interfaces)
            missing = [name for name in setting.split(",") if name not in found] if variable.startswith("GLOO") else []
            if missing or not found:
                raise ConfigurationError(
                    f"{self.describe(variable)}: host {host} has no interface with an IP address that "
                    f"{'is called ' + ', '.join(map(repr, missing)) if missing else 'this matches'}, and the group of all ranks "
                    f"would use it; it has {', '.join(interfaces)}. Correct the setting, or remove it: an interface is chosen "
                    f"for each group"
                )

    def facts(self) -> dict[str, str]:
        """The settings that must be the same on all ranks: NCCL's network module, whether RDMA is off, whether gloo's interface is set.

        Lists of cards and interfaces may differ from host to host.
        """
        return {
            "NCCL_NET": self.get("NCCL_NET") or "not set",
            "NCCL_IB_DISABLE": "on" if self.get("NCCL_IB_DISABLE") not in (None, "0") else "off",
            "GLOO_SOCKET_IFNAME": "set" if "GLOO_SOCKET_IFNAME" in self.values else "not set",
        }


def set_own(variables: Mapping[str, str]) -> None:
    """Set environment variables and note that they are not the user's."""
    for name, value in variables.items():
        os.environ[name] = os.environ[_OWN + name] = value


def hca_allows(setting: str, card: str) -> bool:
    """Whether NCCL_IB_HCA lets NCCL use a card: a list of names, matched by prefix, or exactly after "="; after "^" they are excluded."""
    device, _, port = card.partition(":")
    return _allows(setting, device, port or "1")


def interface_allows(setting: str, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME lets NCCL use an interface; the syntax is that of NCCL_IB_HCA."""
    return _allows(setting, interface, None)


def _allows(setting: str, name: str, port: str | None) -> bool:
    excluded = setting.startswith("^")
    setting = setting.removeprefix("^")
    exact = setting.startswith("=")

    def matches(entry: str) -> bool:
        wanted, _, wanted_port = entry.partition(":")
        same = name == wanted if exact else name.startswith(wanted)
        return same and (port is None or wanted_port in ("", port))

    entries = (entry.strip() for entry in setting.removeprefix("=").split(","))
    return any(matches(entry) for entry in entries if entry) != excluded


def socket_variables(backend: str) -> tuple[str, ...]:
    """The variables that name interfaces; messages go by gloo whatever the backend of tensors is."""
    return ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if backend == "nccl" else ("GLOO_SOCKET_IFNAME",)


def named_interfaces(variable: str, setting: str, interfaces: Sequence[str]) -> list[str]:
    """Those of a host's ``interfaces`` that GLOO_SOCKET_IFNAME (names) or NCCL_SOCKET_IFNAME (a pattern) selects."""
    if variable == "GLOO_SOCKET_IFNAME":
        return [name for name in setting.split(",") if name in interfaces]
    return [name for name in interfaces if interface_allows(setting, name)]


def local_interfaces() -> list[str]:
    """The network interfaces of this host that have an IP address, which sockets need."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [name for name, found in psutil.net_if_addrs().items() if any(a.family in families for a in found)]
