"""GroupTransports: carries out on this rank which network card a group uses.

plan/transport.py chooses; here the choice becomes a gloo device on an interface, or the network module of an NCCL
communicator and the variables that NCCL reads once a process. What the user has set by NCCL's or gloo's own variables
is respected, never overridden; NCCL_NET and NCCL_IB_HCA are refused where a group cannot work with them.

    transports = GroupTransports(chooser, rank=0, backend="gloo", user=UserSettings.read())
    transports.interface(ranks)         # "eth1": where gloo connects this group
    transports.net_name(ranks)          # "IB" or "Socket": NCCL's network module for this group
    transports.describe(ranks)          # ("gloo on eth1", "2 hosts share it")
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.transport import TransportChoice, TransportChooser

# Read by NCCL in this order, the first one from NCCL_CONF_FILE where that is set (NCCL 2.23); an environment variable wins
# over both (NCCL's documentation, "Environment Variables").
_NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")
_OWN = "HOLMES_SET_"  # before a variable's name: what this package has set it to
_WATCHED = ("GLOO_SOCKET_IFNAME", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")


@dataclass(frozen=True, slots=True)
class UserSettings:
    """What the user has set for the communication libraries: by variable, the value and where it stands."""

    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, files: Sequence[str] = _NCCL_FILES) -> UserSettings:
        """From the environment, and for NCCL from its configuration files."""
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
        """The setting with its place, for messages."""
        value, place = self.values[variable]
        return f"{variable}={value} in {place}"

    def facts(self) -> dict[str, str]:
        """What must be alike on all ranks: NCCL's network module, whether RDMA is off, whether gloo's interface is chosen.

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


class GroupTransports:
    """What each group of a rank uses.

    Args:
        chooser: of the job's topology; None where nothing is known of it: then the libraries choose.
        rank: this global rank.
        backend: "gloo" or "nccl", for tensors.
    """

    def __init__(
        self, chooser: TransportChooser | None, *, rank: int, backend: str, user: UserSettings | None = None
    ) -> None:
        self._chooser = chooser
        self._rank = rank
        self._backend = backend
        self._user = user or UserSettings()
        self._chosen: dict[tuple[int, ...], TransportChoice] = {}

    def choose(self, ranks: Sequence[int]) -> TransportChoice | None:
        """The choice for a group; None where nothing is known."""
        if self._chooser is None:
            return None
        key = tuple(sorted(ranks))
        if key not in self._chosen:
            self._chosen[key] = self._chooser.choose(key)
        return self._chosen[key]

    def interface(self, ranks: Sequence[int]) -> str | None:
        """The interface on which this rank's gloo connects a group; None: gloo's own choice."""
        if self._user.get("GLOO_SOCKET_IFNAME") is not None:
            return None
        choice = self.choose(ranks)
        nic = None if choice is None else choice.nic_of(self._rank)
        if choice is None or nic is None:
            return None
        if nic.interface is None and choice.kind != "local":
            raise ConfigurationError(
                f"{nic.name} is the card of rank {self._rank} for the group of ranks {_shown(ranks)}, but which network "
                f"interface is behind it is not known, and gloo needs one: give its `interface` in the topology file"
            )
        return nic.interface

    def host_interface(self) -> str | None:
        """The Ethernet interface of this rank for messages between hosts; None: gloo's own choice."""
        if self._chooser is None or self._user.get("GLOO_SOCKET_IFNAME") is not None:
            return None
        nic = self._chooser.main_nic(self._rank)
        return None if nic is None else nic.interface

    def net_name(self, ranks: Sequence[int]) -> str | None:
        """NCCL's network module for a group; None: NCCL's own choice, or the user's.

        Raises:
            ConfigurationError: the user's setting cannot serve this group.
        """
        choice = self.choose(ranks)
        if choice is None or choice.kind == "local":
            return None
        wanted = self._user.get("NCCL_NET")
        disabled = self._user.get("NCCL_IB_DISABLE") not in (None, "0")
        if wanted is not None:
            if wanted.lower() == "ib" and not choice.is_rdma:
                raise ConfigurationError(
                    f"{self._user.describe('NCCL_NET')} forces every group on RDMA, but the group of ranks {_shown(ranks)} "
                    f"has none in common: {choice.reason}. Remove the setting; a module is chosen for each group"
                )
            return None
        if not choice.has_rdma:
            return None  # nothing to keep NCCL from; a plugin of the user's may know a network that we do not
        return "IB" if choice.is_rdma and not disabled else "Socket"

    def nccl_environment(self, groups: Sequence[Sequence[int]]) -> dict[str, str]:
        """NCCL's variables that hold for all groups of this process; to be set before the first communicator.

        Both are lists that NCCL reads once, so they hold what any of the groups needs.

        Raises:
            ConfigurationError: the user's list leaves out a card that a group needs.
        """
        if self._backend != "nccl" or self._chooser is None:
            return {}
        cards: list[str] = []
        for ranks in groups:
            choice = self.choose(ranks)
            if choice is not None and self._rank in ranks and self.net_name(ranks) == "IB":
                cards += [nic.name for nic in choice.rails.get(self._rank, ()) if nic.name not in cards]
        found = {}
        main = self._chooser.main_nic(self._rank)
        if "NCCL_SOCKET_IFNAME" not in self._user.values and main is not None and main.interface is not None:
            found["NCCL_SOCKET_IFNAME"] = f"={main.interface}"
        if cards and "NCCL_IB_HCA" not in self._user.values:
            found["NCCL_IB_HCA"] = "=" + ",".join(cards)
        elif cards:
            allowed = [card for card in cards if hca_allows(self._user.get("NCCL_IB_HCA") or "", card)]
            if not allowed:
                raise ConfigurationError(
                    f"{self._user.describe('NCCL_IB_HCA')} leaves out {', '.join(cards)}, one of which a group of rank "
                    f"{self._rank} needs; add it, or remove the setting"
                )
        return found

    def describe(self, ranks: Sequence[int]) -> tuple[str, str]:
        """What moves a group's bytes, and why, in words."""
        choice = self.choose(ranks)
        if choice is None:
            return self._backend, "the network is not known"
        if choice.kind == "local":
            return self._backend, choice.reason
        if self._backend == "gloo":
            if self._user.get("GLOO_SOCKET_IFNAME") is not None:
                return "gloo", f"{self._user.describe('GLOO_SOCKET_IFNAME')} is respected"
            return f"gloo on {_interfaces(choice)}", f"{choice.kind}: {choice.reason}"
        wanted = self._user.get("NCCL_NET")
        if wanted is not None:
            return f"nccl {wanted}", f"{self._user.describe('NCCL_NET')} is respected"
        name = self.net_name(ranks)
        if choice.is_rdma and name == "Socket":
            return "nccl Socket", f"{self._user.describe('NCCL_IB_DISABLE')} is respected"
        cards = list(dict.fromkeys(nic.name for rails in choice.rails.values() for nic in rails))
        on = f" on {'/'.join(cards[:3])}{'/...' if len(cards) > 3 else ''}" if name == "IB" else ""
        return f"nccl {name or 'by its own choice'}{on}", f"{choice.kind}: {choice.reason}"

    def ends(self, ranks: Sequence[int], *, on_host: bool = False) -> str:
        """The members of a group with host, interface and address, for messages; "" where nothing is known.

        ``on_host``: as messages between hosts travel.
        """
        chooser = self._chooser
        if chooser is None:
            return ""
        choice = self.choose(ranks)
        described = []
        for rank in ranks[:8]:
            nic = chooser.main_nic(rank) if on_host or choice is None else choice.nic_of(rank)
            place = (
                ""
                if nic is None
                else f" ({nic.interface or nic.name} {', '.join(nic.addresses[:1])})".replace(" )", ")")
            )
            described.append(f"rank {rank} on {chooser.host(rank).name}{place}")
        return ", ".join(described) + (", ..." if len(ranks) > 8 else "")

    def fallbacks(self, groups: Sequence[Sequence[int]]) -> list[str]:
        """Of ``groups``, those inside a fabric that must use Ethernet because a card is down; one line each."""
        lines = []
        for ranks in groups:
            choice = self.choose(ranks)
            if choice is not None and choice.fallback:
                lines.append(f"the group of ranks {_shown(ranks)} uses Ethernet: {choice.reason}")
        return list(dict.fromkeys(lines))


def hca_allows(setting: str, card: str) -> bool:
    """Whether NCCL_IB_HCA lets NCCL use a card: a list of names, by prefix or after "=" exactly, after "^" excluded."""
    excluded = setting.startswith("^")
    setting = setting.removeprefix("^")
    exact = setting.startswith("=")
    names = [name.strip() for name in setting.removeprefix("=").split(",") if name.strip()]
    device, _, port = card.partition(":")

    def matches(name: str) -> bool:
        wanted, _, wanted_port = name.partition(":")
        same = device == wanted if exact else device.startswith(wanted)
        return same and wanted_port in ("", port or "1")

    return any(matches(name) for name in names) != excluded


def _interfaces(choice: TransportChoice) -> str:
    names = list(dict.fromkeys(nic.interface or nic.name for nic in choice.nics.values()))
    return "/".join(names[:3]) + ("/..." if len(names) > 3 else "") if names else "its own choice"


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
