"""Topology: which hosts, clusters and links exist. Plain data, read from and written to YAML.

A cluster is a set of hosts that share a fast network; links join clusters. Nothing is decided here: the plan
package decides what runs where, and finding hardware is the work of other modules.

A topology file:

    clusters:
      - name: berlin
        hosts:
          - name: node            # with a count the hosts are called node-0, node-1, ...
            count: 2              # optional: so many alike hosts
            devices: 8            # processes on each host: one per GPU
            nics:                 # optional
              - {name: mlx5_0, kind: infiniband, bandwidth: 200 Gbit/s}
              - {name: eth0, kind: ethernet, bandwidth: 25 Gbit/s}
      - name: paris
        hosts:
          - {name: gpu, count: 2, devices: 8, nics: [{name: mlx5_0, kind: roce}]}
    links:                        # optional: what is known about the way between two clusters
      - {ends: [berlin, paris], transport: ethernet, bandwidth: 25 Gbit/s, latency: 50 us}

kind and transport are infiniband, roce or ethernet. A bandwidth has a unit (bit/s, B/s, with k, M, G, T, or
Ki, Mi, Gi, Ti before B/s) or is a bare number of bytes per second. A latency has a unit (s, ms, us, ns) or is
a bare number of seconds. A NIC without a bandwidth is one whose speed is not known. Global ranks are dealt
out in the order of the file: the first host of the first cluster has the first ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from lightning_holmes.cluster.yaml_node import YamlNode
from lightning_holmes.errors import ConfigurationError

TransportKind = Literal["infiniband", "roce", "ethernet"]
TRANSPORT_KINDS: tuple[str, ...] = get_args(TransportKind)

_MAX_COUNT = 100_000  # hosts from one entry; beyond it the count is a slip of the finger
_MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card. bandwidth_bytes_per_s is None where it is not known."""

    name: str
    kind: TransportKind
    bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind, f"kind of NIC {self.name!r}")
        if self.bandwidth_bytes_per_s is not None:
            _check_bandwidth(self.bandwidth_bytes_per_s, f"NIC {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: how many devices (processes) it has, and its network cards."""

    name: str
    devices: int
    nics: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise ConfigurationError(f"host {self.name!r}: devices={self.devices!r}; write a whole number, at least 1")
        _check_unique([nic.name for nic in self.nics], f"NICs of host {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between two clusters, named by the clusters at its ends. It counts in both directions."""

    ends: tuple[str, str]
    transport: TransportKind
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _check_kind(self.transport, f"transport of link {self.ends}")
        _check_bandwidth(self.bandwidth_bytes_per_s, f"link {self.ends}")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigurationError(f"link {self.ends}: latency_s={self.latency_s!r}; write zero or more seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts that share a fast network."""

    name: str
    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigurationError(f"cluster {self.name!r} has no hosts; give it at least one")

    @property
    def num_devices(self) -> int:
        """Devices of all its hosts."""
        return sum(host.devices for host in self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All clusters and the links between them. source names the file it came from, for messages only."""

    clusters: tuple[Cluster, ...]
    links: tuple[Link, ...] = ()
    source: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.clusters:
            raise ConfigurationError("a topology needs at least one cluster")
        names = [cluster.name for cluster in self.clusters]
        _check_unique(names, "clusters")
        _check_unique([host.name for cluster in self.clusters for host in cluster.hosts], "hosts")
        _check_unique([" and ".join(map(repr, sorted(link.ends))) for link in self.links], "links")
        for link in self.links:
            if link.ends[0] == link.ends[1] or not set(link.ends) <= set(names):
                raise ConfigurationError(f"link {link.ends} must join two of the clusters {', '.join(names)}")

    @property
    def num_devices(self) -> int:
        """Devices of all clusters: the world size that this topology describes."""
        return sum(cluster.num_devices for cluster in self.clusters)

    def cluster_of_rank(self, rank: int) -> Cluster:
        """The cluster of a global rank. Ranks are dealt to clusters and hosts in the order of the file."""
        first = 0
        for cluster in self.clusters:
            if first <= rank < first + cluster.num_devices:
                return cluster
            first += cluster.num_devices
        raise ConfigurationError(f"rank {rank} is not in {self.described}: it has the ranks 0 to {first - 1}")

    @property
    def described(self) -> str:
        """How messages call this topology: with its file where there is one."""
        return f"the topology in {self.source}" if self.source is not None else "the topology"

    @classmethod
    def single_cluster(cls, num_hosts: int, devices_per_host: int) -> Topology:
        """One cluster of alike hosts: what is assumed where nothing is known."""
        hosts = tuple(Host(name=f"host{index}", devices=devices_per_host) for index in range(num_hosts))
        return cls(clusters=(Cluster(name="cluster0", hosts=hosts),))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Topology:
        """Read a topology file. Raises ConfigurationError that names file, line, key, value and the fix."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the topology file {path} cannot be read: {error}") from error
        return cls.from_yaml_text(text, source=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "topology") -> Topology:
        """Read a topology from YAML text; source is the name that messages use for it."""
        entries = YamlNode.parse(text, source=source).mapping(required=("clusters",), optional=("links",))
        clusters: list[Cluster] = []
        cluster_lines: dict[str, int] = {}
        host_lines: dict[str, int] = {}
        for node in entries["clusters"].items(minimum=1):
            clusters.append(_read_cluster(node, cluster_lines, host_lines))
        links: list[Link] = []
        if "links" in entries:
            link_lines: dict[str, int] = {}
            links = [_read_link(node, list(cluster_lines), link_lines) for node in entries["links"].items()]
        return cls(clusters=tuple(clusters), links=tuple(links), source=source)

    def to_yaml(self) -> str:
        """YAML text that from_yaml_text reads back as an equal topology. Every host is written out."""
        data: dict[str, Any] = {
            "clusters": [
                {"name": cluster.name, "hosts": [_host_data(host) for host in cluster.hosts]}
                for cluster in self.clusters
            ]
        }
        if self.links:
            data["links"] = [
                {
                    "ends": list(link.ends),
                    "transport": link.transport,
                    "bandwidth": float(link.bandwidth_bytes_per_s),
                    "latency": float(link.latency_s),
                }
                for link in self.links
            ]
        return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _host_data(host: Host) -> dict[str, Any]:
    data: dict[str, Any] = {"name": host.name, "devices": host.devices}
    if host.nics:
        data["nics"] = [{"name": nic.name, "kind": nic.kind} for nic in host.nics]
        for entry, nic in zip(data["nics"], host.nics, strict=True):
            if nic.bandwidth_bytes_per_s is not None:
                entry["bandwidth"] = float(nic.bandwidth_bytes_per_s)
    return data


def _read_cluster(node: YamlNode, cluster_lines: dict[str, int], host_lines: dict[str, int]) -> Cluster:
    entries = node.mapping(required=("name", "hosts"))
    name = _new_name(entries["name"], entries["name"].text(), cluster_lines)
    hosts: list[Host] = []
    for host in entries["hosts"].items(minimum=1):
        hosts.extend(_read_hosts(host, host_lines))
    return Cluster(name=name, hosts=tuple(hosts))


def _read_hosts(node: YamlNode, host_lines: dict[str, int]) -> list[Host]:
    entries = node.mapping(required=("name", "devices"), optional=("count", "nics"))
    name = entries["name"].text()
    devices = entries["devices"].integer(minimum=1, maximum=_MAX_DEVICES)
    nics: list[Nic] = []
    nic_lines: dict[str, int] = {}
    for nic in entries["nics"].items() if "nics" in entries else ():
        nics.append(_read_nic(nic, nic_lines))
    names = [name]
    if "count" in entries:
        count = entries["count"].integer(minimum=1, maximum=_MAX_COUNT)
        names = [f"{name}-{index}" for index in range(count)]
    return [
        Host(name=_new_name(entries["name"], host, host_lines), devices=devices, nics=tuple(nics)) for host in names
    ]


def _read_nic(node: YamlNode, nic_lines: dict[str, int]) -> Nic:
    entries = node.mapping(required=("name", "kind"), optional=("bandwidth",))
    return Nic(
        name=_new_name(entries["name"], entries["name"].text(), nic_lines),
        kind=cast(TransportKind, entries["kind"].choice(TRANSPORT_KINDS)),
        bandwidth_bytes_per_s=entries["bandwidth"].bandwidth_bytes_per_s() if "bandwidth" in entries else None,
    )


def _read_link(node: YamlNode, clusters: list[str], link_lines: dict[str, int]) -> Link:
    entries = node.mapping(required=("ends", "transport", "bandwidth", "latency"))
    ends = entries["ends"].items()
    if len(ends) != 2:
        raise entries["ends"].error(f"a link has two ends, not {len(ends)}; write [one cluster, another cluster]")
    first, second = (end.choice(clusters) for end in ends)
    if first == second:
        raise entries["ends"].error(f"both ends are {first!r}; a link joins two different clusters")
    _new_name(entries["ends"], " and ".join(map(repr, sorted((first, second)))), link_lines)
    return Link(
        ends=(first, second),
        transport=cast(TransportKind, entries["transport"].choice(TRANSPORT_KINDS)),
        bandwidth_bytes_per_s=entries["bandwidth"].bandwidth_bytes_per_s(),
        latency_s=entries["latency"].latency_s(),
    )


def _new_name(node: YamlNode, name: str, lines: dict[str, int]) -> str:
    if name in lines:
        raise node.error(f"{name} is already on line {lines[name]}; every name may stand once")
    lines[name] = node.line
    return name


def _check_kind(kind: str, what: str) -> None:
    if kind not in TRANSPORT_KINDS:
        raise ConfigurationError(f"{what} is {kind!r}; allowed: {', '.join(TRANSPORT_KINDS)}")


def _check_bandwidth(value: float, what: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{what}: bandwidth_bytes_per_s={value!r}; write a positive, finite number")


def _check_unique(names: list[str], what: str) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigurationError(f"{what}: every name may stand once, but repeated: {', '.join(repeated)}")
