"""Groups hosts into clusters, from hints about the fabrics of their network cards and from connection tests.

A pure function of the inventories and of the results of connection tests: it opens no connections, and the order
of the ranks does not matter. Evidence, the strongest first:

1. HOLMES_CLUSTER of a host: hosts with the same value are one cluster.
2. Connection tests between a representative of each candidate group and its other hosts.
3. Hints. InfiniBand: subnet prefix and subnet manager. RoCE: IP subnet. Hosts with the same hints are on one fabric. RoCE that is
   routed between subnets is not found: HOLMES_CLUSTER joins it.

A host on several fabrics goes to one that it shares with others, then to the fastest, then to the one with the most hosts. A RoCE port that
carries the host's other traffic (an Ethernet card that can do RDMA, too) counts only where the host is on no other fabric: its network may
reach every site over a slow link. A host whose RDMA ports are
all down goes to the cluster that its hints match, and the cluster notes that it must fall back to Ethernet. Hosts without
RDMA form clusters by the subnet of their main interface.

    topology = group_hosts(inventories, reachable=lambda one, other: None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_holmes.cluster.hardware import HostInventory
from lightning_holmes.cluster.interfaces import subnet_of
from lightning_holmes.cluster.live_host import LiveHost, merge_ranks
from lightning_holmes.cluster.network import TRANSPORT_KINDS, Cluster, Host, Nic, TransportKind
from lightning_holmes.cluster.rdma import DEFAULT_PREFIX, RdmaPort
from lightning_holmes.cluster.sysfs import natural_key
from lightning_holmes.cluster.topology import Topology

RDMA_KINDS: tuple[TransportKind, ...] = ("infiniband", "roce")
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, order=True)
class NicEnd:
    """A NIC of a host, as an end of a connection test."""

    host: str
    nic: str


# Whether the second NIC could connect to the first; None: not tested, or it cannot be tested.
Reachable = Callable[[NicEnd, NicEnd], "bool | None"]


@dataclass(frozen=True, slots=True)
class _Member:
    """A host on a fabric, with its cards on the fabric. The first card represents all of them."""

    host: LiveHost
    nics: tuple[Nic, ...]

    @property
    def carries_all_traffic(self) -> bool:
        """Whether all these cards are Ethernet ports that reach the master or the default route, too: alone, in a bond or under a VLAN."""
        main = self.host.inventory.main
        if main is None:
            return False
        below = {main.name, main.name.partition(".")[0], *main.members}
        return all(nic.kind == "roce" and nic.interface in below for nic in self.nics)


@dataclass(frozen=True, slots=True)
class _Fabric:
    """Hosts that reach each other over one kind of network. The first member was tested against the others."""

    kind: TransportKind
    name: str
    members: tuple[_Member, ...]


def group_hosts(inventories: Sequence[HostInventory], *, reachable: Reachable | None = None) -> Topology:
    """Make the topology of a job: clusters, their hosts and ranks, without speeds.

    Args:
        inventories: one for each rank.
        reachable: returns results of connection tests; see :data:`Reachable`. Without it, only hints are used.
    """
    hosts = merge_ranks(inventories)
    return _Grouping(hosts, reachable or (lambda one, other: None)).topology()


class _Grouping:
    """One run of group_hosts."""

    def __init__(self, hosts: Sequence[LiveHost], reachable: Reachable) -> None:
        self.hosts = hosts
        self.reachable = reachable
        self.warnings: list[str] = []

    def topology(self) -> Topology:
        fabrics = self.find_rdma_fabrics()
        groups: list[tuple[str | None, TransportKind, str, list[LiveHost]]] = []  # name, kind, fabric, hosts
        chosen: dict[str, list[LiveHost]] = {}
        for host in self.hosts:
            if host.inventory.cluster is not None:
                chosen.setdefault(host.inventory.cluster, []).append(host)
        for name in sorted(chosen):
            kind, fabric = _fabric_of_chosen(name, chosen[name], fabrics)
            groups.append((name, kind, fabric, chosen[name]))
        free = [host for host in self.hosts if host.inventory.cluster is None]
        found = _cover(free, fabrics)
        placed = {host.name for _, members in found for host in members}
        left = self.join_by_hints([host for host in free if host.name not in placed], found)
        groups += [(None, fabric.kind, fabric.name, members) for fabric, members in found]
        for plain in self.find_fabrics("ethernet", [(host, _ethernet_nics(host)) for host in left]):
            groups.append((None, "ethernet", plain.name, [member.host for member in plain.members]))
        names = _names(groups)
        fabric_names = {
            (m.host.name, nic.name): fabric.name for fabric in fabrics for m in fabric.members for nic in m.nics
        }
        clusters = [
            self.make_cluster(name, kind, fabric, members, fabric_names, given is not None)
            for name, (given, kind, fabric, members) in zip(names, groups, strict=True)
        ]
        clusters.sort(key=lambda c: (TRANSPORT_KINDS.index(c.fabric or "ethernet"), natural_key(c.name)))
        return Topology(clusters=tuple(clusters), warnings=tuple(dict.fromkeys(self.warnings)))

    # Fabrics

    def find_rdma_fabrics(self) -> list[_Fabric]:
        """All RDMA fabrics of the ports that are up."""
        fabrics: list[_Fabric] = []
        for kind in RDMA_KINDS:
            candidates = []
            for host in self.hosts:
                ports = {port.name: port for port in host.inventory.rdma if port.kind == kind and port.up}
                nics = [nic for nic in host.inventory.nics() if nic.name in ports]
                candidates.append((host, [(nic, _rdma_hint(ports[nic.name])) for nic in nics]))
            fabrics += self.find_fabrics(kind, candidates)
        return fabrics

    def find_fabrics(
        self, kind: TransportKind, candidates: Iterable[tuple[LiveHost, Sequence[tuple[Nic, str]]]]
    ) -> list[_Fabric]:
        """The fabrics of one kind. candidates: hosts, each with its cards and a hint at the fabric of each card."""
        by_hint: dict[str, list[_Member]] = {}
        for host, nics in candidates:
            for hint in dict.fromkeys(hint for _, hint in nics):
                member = _Member(host, tuple(nic for nic, own in nics if own == hint))
                by_hint.setdefault(hint, []).append(member)
        fabrics: list[_Fabric] = []
        for hint in sorted(by_hint, key=natural_key):
            parts = self.split(kind, hint, by_hint[hint])
            for number, part in enumerate(parts, start=1):
                name = f"{kind}/{hint}" + (f"#{number}" if len(parts) > 1 else "")
                fabrics.append(_Fabric(kind, name, tuple(part)))
        return fabrics

    def split(self, kind: TransportKind, hint: str, members: Sequence[_Member]) -> list[list[_Member]]:
        """Split hosts with the same hint into groups, where a test shows that they are not on one fabric."""
        parts: list[list[_Member]] = []
        for member in members:
            refused_by = None
            for part in parts:
                verdict = self.verdict(part[0], member)
                if verdict is not False:
                    part.append(member)
                    if verdict is None:
                        self.warn_unconfirmed(kind, hint, part[0], member)
                    break
                refused_by = refused_by or part[0]
            else:
                if refused_by is not None:
                    self.warnings.append(
                        f"{member.host.name} ({member.nics[0].name}) looks as if it shared the {kind} fabric {hint} "
                        f"with {refused_by.host.name} ({refused_by.nics[0].name}), but the two do not reach each "
                        "other: they are taken as apart. If only a firewall is in the way, give both hosts the same "
                        "HOLMES_CLUSTER"
                    )
                parts.append([member])
        return parts

    def verdict(self, one: _Member, other: _Member) -> bool | None:
        first, second = one.nics[0], other.nics[0]
        if not first.addresses or not second.addresses:
            return None
        if set(first.addresses) & set(second.addresses):
            return False  # the same private address in two networks
        return self.reachable(NicEnd(one.host.name, first.name), NicEnd(other.host.name, second.name))

    def warn_unconfirmed(self, kind: TransportKind, hint: str, one: _Member, other: _Member) -> None:
        subnets = {one.host.ethernet_subnet, other.host.ethernet_subnet}
        guessed = hint == _UNKNOWN or (kind == "infiniband" and hint.startswith(DEFAULT_PREFIX))
        if kind != "ethernet" and guessed and len(subnets) > 1:
            self.warnings.append(
                f"{one.host.name} and {other.host.name} are taken to share one {kind} fabric: their cards say nothing "
                "else, no connection could be tried (no IP address on them), and their Ethernet subnets differ. If "
                "they do not, give the hosts different values of HOLMES_CLUSTER"
            )

    # Hosts whose ports are down

    def join_by_hints(self, hosts: Sequence[LiveHost], found: list[tuple[_Fabric, list[LiveHost]]]) -> list[LiveHost]:
        """Add hosts whose RDMA ports are all down to the fabrics that their hints match; return the hosts without a match."""
        left: list[LiveHost] = []
        weak: dict[int, list[LiveHost]] = {}
        for host in hosts:
            scores = []
            for index, (fabric, members) in enumerate(found):
                evidence = _evidence(host, fabric)
                if evidence is not None and any(evidence):
                    scores.append((evidence, len(members), -index))
            if not scores:
                left.append(host)
                continue
            evidence, _, index = max(scores)
            if any(evidence[:2]):
                found[-index][1].append(host)
            else:
                weak.setdefault(-index, []).append(host)
        for index, guests in weak.items():
            # on weak evidence only a minority joins: with them, the fabric's hosts fall back to Ethernet
            alone = len([fabric for fabric, _ in found if fabric.kind == found[index][0].kind]) == 1
            if alone and len(guests) < len(found[index][0].members):
                found[index][1].extend(guests)
            else:
                left += guests
        for _, members in found:
            members.sort(key=lambda host: natural_key(host.name))
        for host in left:
            down = ", ".join(port.name for port in host.down_ports())
            if down:
                self.warnings.append(f"{host.name}: {down} down, and no other host shares its fabric; it uses Ethernet")
        return sorted(left, key=lambda host: natural_key(host.name))

    # The result

    def make_cluster(
        self,
        name: str,
        kind: TransportKind,
        fabric: str,
        members: Sequence[LiveHost],
        fabric_names: Mapping[tuple[str, str], str],
        given: bool,
    ) -> Cluster:
        hosts = []
        without = []
        made = fabric == f"{kind}/{name}"  # the fabric exists only because the user named the cluster
        if given and not made:
            fabric = f"{fabric}/{name}"  # the user may split what looks like one fabric
        for member in members:
            nics = []
            for nic in member.inventory.nics():
                own = fabric_names.get((member.name, nic.name))
                if own is not None and given:
                    own = f"{own}/{name}"
                if nic.kind == kind and kind != "ethernet" and (own is None or (given and made)):
                    own = fabric  # the fabric of a port that is down, or the fabric that the user named
                elif nic.kind == "ethernet":
                    own = _ethernet_hint(member, nic)
                    own = f"ethernet/{own}" if own != _UNKNOWN else None
                nics.append(replace(nic, fabric=own))
            host = Host(name=member.name, devices=len(member.ranks), nics=tuple(nics), ranks=member.ranks)
            hosts.append(host)
            if kind != "ethernet" and host.nic_of(kind, fabric) is None:
                down = {port: f"state {port.state or 'unknown'}" for port in member.down_ports() if port.kind == kind}
                down |= {port: f"its interface {port.interface} is down" for port in down if port.state == "ACTIVE"}
                what = ", ".join(f"{port.name} is down ({why})" for port, why in down.items())
                without.append(f"host {member.name}: {what or f'no {kind} card on the fabric {fabric}'}")
        fallback = "; ".join(without) or None
        if fallback is not None:
            self.warnings.append(f"cluster {name}: {fallback}; groups with this host use Ethernet")
        return Cluster(name=name, hosts=tuple(hosts), fabric=kind, fallback=fallback)


def _cover(free: Sequence[LiveHost], fabrics: Sequence[_Fabric]) -> list[tuple[_Fabric, list[LiveHost]]]:
    """Assign hosts to fabrics, first by the ports that carry nothing else, then the hosts that are left by their remaining ports. Repeatedly
    take the fabric that is shared by several remaining hosts, then the fastest, then the one with the most hosts."""
    remaining = {host.name for host in free}
    found: dict[str, tuple[_Fabric, list[LiveHost]]] = {}
    apart = [replace(f, members=tuple(m for m in f.members if not m.carries_all_traffic)) for f in fabrics]
    for candidates in (apart, list(fabrics)):
        left = list(candidates)  # in the order of their names, so that ties are broken deterministically
        while left:
            members = {f.name: [member for member in f.members if member.host.name in remaining] for f in left}
            best = max(left, key=lambda f: _preference(f, members[f.name]))
            left.remove(best)
            if members[best.name]:
                whole = next(f for f in fabrics if f.name == best.name)
                found.setdefault(best.name, (whole, []))[1].extend(m.host for m in members[best.name])
                remaining -= {member.host.name for member in members[best.name]}
    for _, hosts in found.values():
        hosts.sort(key=lambda host: natural_key(host.name))
    return list(found.values())


def _preference(fabric: _Fabric, members: Sequence[_Member]) -> tuple[bool, float, int, int]:
    """How much a fabric of these hosts is preferred to another: shared at all, its slowest host's bytes/s, its reach, its kind."""
    rate = min((sum(nic.bandwidth_bytes_per_s or 0.0 for nic in member.nics) for member in members), default=0.0)
    return len(members) > 1, rate, len(members), -TRANSPORT_KINDS.index(fabric.kind)


def _evidence(host: LiveHost, fabric: _Fabric) -> tuple[bool, bool, bool] | None:
    """The evidence that a host with down ports is on a fabric: equal (IP subnet, prefix, Ethernet subnet); None if it is not."""
    ports = [port for port in host.down_ports() if port.kind == fabric.kind]
    if not ports:
        return None
    theirs = [(member.host, port) for member in fabric.members for port in _ports_of(member)]
    subnets = {subnet for _, port in theirs for subnet in _subnets(port)}
    own = {subnet for port in ports for subnet in _subnets(port)}
    if own and subnets and not own & subnets:
        return None  # another subnet: another fabric
    prefixes = {port.subnet_prefix for _, port in theirs if port.subnet_prefix is not None}
    own_prefixes = {port.subnet_prefix for port in ports if port.subnet_prefix is not None}
    if own_prefixes and prefixes and not own_prefixes & prefixes:
        return None
    return (
        bool(own & subnets),
        bool((own_prefixes & prefixes) - {DEFAULT_PREFIX}),
        host.ethernet_subnet is not None and host.ethernet_subnet in {member.ethernet_subnet for member, _ in theirs},
    )


def _ports_of(member: _Member) -> list[RdmaPort]:
    names = {nic.name for nic in member.nics}
    return [port for port in member.host.inventory.rdma if port.name in names]


def _subnets(port: RdmaPort) -> set[str]:
    return {subnet for subnet in map(subnet_of, port.addresses) if subnet is not None}


def _rdma_hint(port: RdmaPort) -> str:
    """The hint at the fabric of a port that is up."""
    if port.kind == "infiniband":
        prefix = port.subnet_prefix or _UNKNOWN
        return f"{prefix}/{port.sm_lid}" if port.sm_lid is not None else prefix
    return next((subnet for subnet in map(subnet_of, port.addresses) if subnet is not None), _UNKNOWN)


def _ethernet_nics(host: LiveHost) -> list[tuple[Nic, str]]:
    """The main interface with its subnet as the hint; a host without any interface gets a hint of its own."""
    nic = next((nic for nic in host.inventory.nics() if nic.kind == "ethernet"), None)
    if nic is None:
        return [(Nic(name="none", kind="ethernet", up=False), f"{_UNKNOWN} {host.name}")]
    return [(nic, _ethernet_hint(host, nic))]


def _ethernet_hint(host: LiveHost, nic: Nic) -> str:
    addresses = next((i.addresses for i in host.inventory.interfaces if i.name == nic.name), ())
    return next((subnet for subnet in map(subnet_of, addresses) if subnet is not None), _UNKNOWN)


def _fabric_of_chosen(name: str, hosts: Sequence[LiveHost], fabrics: Sequence[_Fabric]) -> tuple[TransportKind, str]:
    """Kind and fabric of a cluster that the user named: the first RDMA kind of which all its hosts have a port, up or down."""
    names = {host.name for host in hosts}
    for kind in RDMA_KINDS:
        if not all(any(port.kind == kind for port in host.inventory.rdma) for host in hosts):
            continue
        alike = [fabric for fabric in fabrics if fabric.kind == kind]
        shared = [fabric for fabric in alike if names <= {member.host.name for member in fabric.members}]
        return kind, shared[0].name if shared else f"{kind}/{name}"
    return "ethernet", f"ethernet/{name}"


def _names(groups: Sequence[tuple[str | None, TransportKind, str, list[LiveHost]]]) -> list[str]:
    """Cluster names: those the user gave; otherwise the kind, numbered by fabric and first host if there are several."""
    taken = {given for given, _, _, _ in groups if given is not None}
    names: dict[int, str] = {}
    for kind in TRANSPORT_KINDS:
        mine = [index for index, (given, own, _, _) in enumerate(groups) if given is None and own == kind]
        mine.sort(key=lambda index: (natural_key(groups[index][2]), natural_key(groups[index][3][0].name)))
        number = 0
        for index in mine:
            name = kind
            while len(mine) > 1 or name in taken:
                number += 1
                name = f"{kind}-{number}"
                if name not in taken:
                    break
            names[index] = name
            taken.add(name)
    return [given if given is not None else names[index] for index, (given, _, _, _) in enumerate(groups)]
