"""GroupTransports: applies the choice of a group's network card on this rank.

plan/transport.py chooses; this module turns the choice into a gloo device on an interface, or into the network module
of an NCCL communicator and the variables that NCCL reads once per process. What the user has set by NCCL's or gloo's
own variables (user_settings.py) is respected, never overridden, and refused if a group cannot work with it.

    transports = GroupTransports(chooser, rank=0, backend="gloo", user=UserSettings.read())
    transports.interface(ranks)         # "eth1": where gloo connects this group
    transports.net_name(ranks)          # "IB" or "Socket": NCCL's network module for this group
    transports.describe(ranks)          # ("gloo on eth1", "2 hosts share it")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_holmes.cluster.topology import Nic
from lightning_holmes.comm.user_settings import UserSettings, hca_allows, named_interfaces, socket_variables
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.groups import Use
from lightning_holmes.plan.transport import TransportChoice, TransportChooser


class GroupTransports:
    """The network card and transport of each group of a rank.

    Args:
        chooser: chooses cards by the job's topology; None if the topology is not known: then the libraries choose.
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
        """The choice for a group; None if the topology is not known."""
        if self._chooser is None:
            return None
        key = tuple(sorted(ranks))
        if key not in self._chosen:
            self._chosen[key] = self._chooser.choose(key)
        return self._chosen[key]

    def interface(self, ranks: Sequence[int]) -> str | None:
        """The interface on which gloo connects a group on this rank, or the user's GLOO_SOCKET_IFNAME; None: gloo chooses.

        Raises:
            ConfigurationError: the network interface of the chosen card is not known.
        """
        named = self._user.get("GLOO_SOCKET_IFNAME")
        if named is not None:
            return named
        choice = self.choose(ranks)
        nic = None if choice is None else choice.nic_of(self._rank)
        if choice is None or nic is None:
            return None
        if nic.interface is None and choice.kind != "local":
            raise ConfigurationError(
                f"{nic.name} is the card of rank {self._rank} for the group of ranks {_shown(ranks)}, but which network "
                f"interface it has is not known, and gloo needs one: give its `interface` in the topology file"
            )
        return nic.interface

    def fast_cards(self, ranks: Sequence[int]) -> list[tuple[str, str]]:
        """The interface of this rank's RDMA card for a group, and the card in words; empty if the group uses none."""
        choice = self.choose(ranks)
        is_named = self._user.get("GLOO_SOCKET_IFNAME") is not None
        if choice is None or not choice.is_rdma or self._chooser is None or (self._backend == "gloo" and is_named):
            return []
        chosen = choice.nic_of(self._rank)
        nics = [] if chosen is None else [chosen]
        host = self._chooser.host(self._rank).name
        return [
            (
                nic.interface,
                f"the {nic.kind} card {nic.name} ({nic.interface}{f', {nic.addresses[0]}' if nic.addresses else ''}) of host {host}",
            )
            for nic in nics
            if nic.interface is not None
        ]

    def host_interface(self) -> str | None:
        """The Ethernet interface of this rank for messages between hosts, or the user's GLOO_SOCKET_IFNAME; None: gloo chooses."""
        named = self._user.get("GLOO_SOCKET_IFNAME")
        if named is not None or self._chooser is None:
            return named
        nic = self._chooser.main_nic(self._rank)
        return None if nic is None else nic.interface

    def net_name(self, ranks: Sequence[int]) -> str | None:
        """NCCL's network module for a group; None: NCCL or the user chooses it.

        Raises:
            ConfigurationError: the group cannot work with the user's NCCL_NET.
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
            return None  # no RDMA to keep NCCL from, and a user's plugin may know a network that we do not
        return "IB" if choice.is_rdma and not disabled else "Socket"

    def nccl_environment(self, groups: Sequence[Sequence[int]]) -> dict[str, str]:
        """NCCL's variables for all groups of this process; set them before the first communicator is made.

        NCCL reads the lists of interfaces and of cards once, so they hold what any of the groups needs.

        Raises:
            ConfigurationError: the user's list leaves out a card that a group needs.
        """
        if self._backend != "nccl" or self._chooser is None:
            return {}
        cards: list[str] = []
        listed = self._user.get("NCCL_IB_HCA")
        for ranks in groups:
            choice = self.choose(ranks)
            if choice is None or self._rank not in ranks or self.net_name(ranks) != "IB":
                continue
            rails = [nic.name for nic in choice.rails.get(self._rank, ())]
            if listed is not None and not any(hca_allows(listed, card) for card in rails):
                raise ConfigurationError(
                    f"{self._user.describe('NCCL_IB_HCA')} leaves out {', '.join(rails)} of host "
                    f"{self._chooser.host(self._rank).name}, one of which the group of ranks {_shown(ranks)} needs; add it, or "
                    f"remove the setting: the cards of each group are chosen"
                )
            cards += [card for card in rails if card not in cards]
        found = {}
        main = self._chooser.main_nic(self._rank)
        if "NCCL_SOCKET_IFNAME" not in self._user.values and main is not None and main.interface is not None:
            found["NCCL_SOCKET_IFNAME"] = f"={main.interface}"
        if cards and listed is None:
            found["NCCL_IB_HCA"] = "=" + ",".join(cards)
        return found

    def check_world(self, ranks: Sequence[int]) -> None:
        """Refuse user settings with which the group of all ``ranks`` cannot work: RDMA that the ranks do not share,
        or interfaces that do not reach all hosts. An interface that reaches all hosts also serves any other group.

        Raises:
            ConfigurationError: such as an interface of a card whose fabric the group leaves, or that is down.
        """
        choice = self.choose(ranks)
        if self._backend == "nccl":
            self.net_name(ranks)
        if self._chooser is None or choice is None or choice.kind == "local":
            return
        host = self._chooser.host(self._rank)
        reaching = self._chooser.reaching(self._rank, ranks)
        main = self._chooser.main_nic(self._rank)
        by_interface: dict[str, list[Nic]] = {}
        for nic in host.nics:
            if nic.interface is not None:
                by_interface.setdefault(nic.interface, []).append(nic)
        for variable in socket_variables(self._backend):
            for name in named_interfaces(variable, self._user.get(variable) or "", list(by_interface)):
                (nic, *_) = by_interface[name]
                if any(card in reaching for card in by_interface[name]) or not nic.addresses:
                    continue  # an interface without an address is not used
                why = (
                    f"{nic.name} ({nic.kind}) is down"
                    if not nic.up
                    else f"{nic.kind} card {nic.name}, which ends there"
                )
                raise ConfigurationError(
                    f"{self._user.describe(variable)} means {name} on host {host.name}, but over it the group of ranks "
                    f"{_shown(ranks)} cannot be connected: {why}; {choice.reason}. Remove the setting, an interface is chosen "
                    f"for each group; or name one that reaches all hosts"
                    + ("" if main is None or main.interface is None else f", such as {main.interface}")
                )

    def describe(self, ranks: Sequence[int], use: Use = "tensors") -> tuple[str, str]:
        """The transport of a group, and the reason for it, in words. Messages use gloo whatever the backend is; WORLD uses Ethernet."""
        backend = "gloo" if use == "messages" else self._backend
        choice = self.choose(ranks)
        if backend == "gloo" and self._user.get("GLOO_SOCKET_IFNAME") is not None:
            return f"gloo on {self._user.get('GLOO_SOCKET_IFNAME')}", self._respected("GLOO_SOCKET_IFNAME")
        if choice is None or self._chooser is None:
            return backend, "the network is not known"
        if choice.kind == "local":
            return backend, choice.reason
        if use != "tensors":
            main = [nic for rank in ranks if (nic := self._chooser.main_nic(rank)) is not None]
            return self._describe_world(backend, _interfaces(main))
        if backend == "gloo":
            return f"gloo on {_interfaces(choice.nics.values())}", f"{choice.kind}: {choice.reason}"
        return self._describe_nccl(choice, self._user.get("NCCL_NET") or self.net_name(ranks))

    def _describe_world(self, backend: str, main: str) -> tuple[str, str]:
        """:meth:`describe` for a group that must reach any host; ``main``: the Ethernet interfaces in words."""
        if backend == "gloo":
            return f"gloo on {main}", "ethernet: the interface that reaches the master"
        if self._user.get("NCCL_NET") is not None:
            return f"nccl {self._user.get('NCCL_NET')}", self._respected("NCCL_NET")
        if self._user.get("NCCL_SOCKET_IFNAME") is not None:
            return "nccl Socket", self._respected("NCCL_SOCKET_IFNAME")
        return f"nccl Socket on {main}", "ethernet: the interface that reaches the master"

    def _describe_nccl(self, choice: TransportChoice, module: str | None) -> tuple[str, str]:
        """:meth:`describe` for a group over several hosts; ``module``: the network module that NCCL uses for it; None: NCCL chooses."""
        reasons = []
        used: list[str] = []
        if self._user.get("NCCL_NET") is not None:
            reasons.append(self._respected("NCCL_NET"))
        elif choice.is_rdma and module == "Socket":
            reasons.append(self._respected("NCCL_IB_DISABLE"))
        if module is not None and module.lower() == "ib":
            used = list(dict.fromkeys(nic.name for rails in choice.rails.values() for nic in rails))
            listed = self._user.get("NCCL_IB_HCA")
            if listed is not None:
                used = [card for card in used if hca_allows(listed, card)]
                reasons.append(self._respected("NCCL_IB_HCA"))
        elif self._user.get("NCCL_SOCKET_IFNAME") is not None:
            reasons.append(self._respected("NCCL_SOCKET_IFNAME"))
        if self._user.get("NCCL_NET") is None:
            reasons.append(f"{choice.kind}: {choice.reason}")
        on = f" on {'/'.join(used[:3])}{'/...' if len(used) > 3 else ''}" if used else ""
        return f"nccl {module or 'by its own choice'}{on}", "; ".join(reasons)

    def _respected(self, variable: str) -> str:
        return f"{self._user.describe(variable)} is respected"

    def ends(self, ranks: Sequence[int], *, on_host: bool = False) -> str:
        """The members of a group with host, interface and address, for messages; "" if the topology is not known.

        ``on_host``: with the Ethernet interfaces, which messages between hosts use.
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
        """One line for each of ``groups`` that is inside a fabric but must use Ethernet because a card is down."""
        lines = []
        for ranks in groups:
            choice = self.choose(ranks)
            if choice is not None and choice.fallback:
                lines.append(f"the group of ranks {_shown(ranks)} uses Ethernet: {choice.reason}")
        return list(dict.fromkeys(lines))


def _interfaces(nics: Iterable[Nic]) -> str:
    names = list(dict.fromkeys(nic.interface or nic.name for nic in nics))
    return "/".join(names[:3]) + ("/..." if len(names) > 3 else "") if names else "its own choice"


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
