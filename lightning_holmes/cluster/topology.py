"""Topology: which hosts, clusters and links exist. Plain data, read from and written to YAML.

A cluster is a set of hosts that share a fast network; links join clusters. Nothing is decided here: the plan
package decides what runs where. Finding it is the work of inventory.py, the nouns are in network.py.

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
        fabric: roce              # optional: the kind of the network that all its hosts share
        hosts:
          - {name: gpu, count: 2, devices: 8, nics: [{name: mlx5_0, kind: roce}]}
          - {name: cpu, role: optimizer}       # optional: no devices; holds parameters and optimizer states
    links:                        # optional: what is known about the way between two clusters
      - {ends: [berlin, paris], transport: ethernet, bandwidth: 25 Gbit/s, latency: 50 us}

kind and transport are infiniband, roce or ethernet. A bandwidth has a unit (bit/s, B/s, with k, M, G, T, or
Ki, Mi, Gi, Ti before B/s) or is a bare number of bytes per second, 100 kB/s at the least. A latency has a unit (s, ms, us, ns) or is
a bare number of seconds, below 1. A NIC without a bandwidth is one whose speed is not known. Global ranks are assigned
out in the order of the file: the first host of the first cluster has the first ranks.

What discovery writes has more keys, all optional in a file: ranks of a host; interface, addresses, up, fabric
and near_devices of a NIC; fallback and speeds of a cluster; measured of a link; unreachable, warnings and
measured_at beside clusters. docs/topology.md lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from lightning_holmes.cluster.network import (
    TRANSPORT_KINDS,
    Cluster,
    Host,
    Link,
    LinkSpeed,
    Nic,
    OptimizerHost,
    TransportKind,
    Unreachable,
)
from lightning_holmes.cluster.record import (
    Place,
    PlacedError,
    YamlText,
    check_unique,
    read_json,
    record,
    to_data,
    to_json,
)
from lightning_holmes.errors import ConfigurationError

__all__ = [
    "TRANSPORT_KINDS",
    "Cluster",
    "Host",
    "Link",
    "LinkSpeed",
    "Nic",
    "OptimizerHost",
    "Topology",
    "TransportKind",
    "Unreachable",
]

_MAX_COUNT = 100_000  # hosts from one entry; beyond it the count is a slip of the finger


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All clusters and the links between them.

    Attributes:
        unreachable: pairs of hosts that did not reach each other when they were tried.
        warnings: what the user should know about how this topology came about.
        measured_at_s: when its speeds were measured (Unix time), if they were.
        optimizer_hosts: without devices, which hold parameters and optimizer states.
        source: the file it came from, for messages only.
    """

    clusters: Annotated[tuple[Cluster, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    unreachable: tuple[Unreachable, ...] = ()
    warnings: tuple[str, ...] = ()
    measured_at_s: Annotated[float | None, Field(alias="measured_at")] = None
    optimizer_hosts: tuple[OptimizerHost, ...] = ()
    source: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        clusters = [cluster.name for cluster in self.clusters]
        check_unique([(("clusters", i, "name"), name) for i, name in enumerate(clusters)], "clusters")
        places: list[Place] = [
            ("clusters", i, "hosts", j, "name") for i, c in enumerate(self.clusters) for j in range(len(c.hosts))
        ]
        hosts = [host.name for host in self.hosts]
        places += [("optimizer_hosts", i, "name") for i in range(len(self.optimizer_hosts))]
        check_unique(list(zip(places, [*hosts, *(h.name for h in self.optimizer_hosts)], strict=True)), "hosts")
        for i, host in enumerate(self.optimizer_hosts):
            if host.cluster is not None and host.cluster not in clusters:
                raise PlacedError(
                    f"the optimizer host {host.name!r} is in cluster {host.cluster!r}, and there are {', '.join(clusters)}; "
                    f"leave its cluster out if it shares a fast network with none of them",
                    ("optimizer_hosts", i, "cluster"),
                )
        check_unique([(("links", i, "ends"), frozenset(link.ends)) for i, link in enumerate(self.links)], "links")
        for i, link in enumerate(self.links):
            _check_ends(link.ends, f"link {link.ends} must join two of the clusters", clusters, ("links", i, "ends"))
        for i, pair in enumerate(self.unreachable):
            what = f"the unreachable pair {pair.ends} must be two of the hosts"
            _check_ends(pair.ends, what, hosts, ("unreachable", i, "ends"))
        self._check_ranks()

    def _check_ranks(self) -> None:
        placed = [host for host in self.hosts if host.ranks is not None]
        if not placed:
            return
        if len(placed) < len(self.hosts):
            without = ", ".join(host.name for host in self.hosts if host.ranks is None)
            raise ConfigurationError(f"ranks are given for some hosts only, not for {without}; give all or none")
        ranks = sorted(rank for host in placed for rank in host.ranks or ())
        if ranks != list(range(len(ranks))):
            wrong = next(index for index, rank in enumerate([*ranks, -1]) if rank != index)
            raise ConfigurationError(
                f"{self.described}: the ranks of all hosts must be 0 to {len(ranks) - 1}, each once; "
                f"rank {wrong} is missing or another stands twice"
            )

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts, cluster by cluster."""
        return tuple(host for cluster in self.clusters for host in cluster.hosts)

    @property
    def num_devices(self) -> int:
        """Devices of all clusters: the world size that this topology describes."""
        return sum(cluster.num_devices for cluster in self.clusters)

    def cluster_of_rank(self, rank: int) -> Cluster:
        """The cluster of a global rank: where the launcher put it, else assigned in the order of the file."""
        return self._place(rank)[0]

    def host_of_rank(self, rank: int) -> Host:
        """The host of a global rank."""
        return self._place(rank)[1]

    def ranks_of_host(self, name: str) -> tuple[int, ...]:
        """The global ranks of a host, ascending."""
        first = 0
        for host in self.hosts:
            if host.name == name:
                return tuple(sorted(host.ranks)) if host.ranks is not None else (*range(first, first + host.devices),)
            first += host.devices
        raise ConfigurationError(f"{self.described} has no host {name!r}; it has {_listed(self.hosts)}")

    def places(self) -> list[tuple[Cluster, Host]]:
        """Cluster and host of every rank, by rank: for those who need them all."""
        places = [(cluster, host) for cluster in self.clusters for host in cluster.hosts for _ in range(host.devices)]
        ranks = [rank for host in self.hosts for rank in host.ranks or ()]
        if not ranks:
            return places
        return [place for _, place in sorted(zip(ranks, places, strict=True), key=lambda pair: pair[0])]

    def _place(self, rank: int) -> tuple[Cluster, Host]:
        places = self.places()
        if not 0 <= rank < len(places):
            raise ConfigurationError(f"rank {rank} is not in {self.described}: it has the ranks 0 to {len(places) - 1}")
        return places[rank]

    def with_ranks(self, hostnames_by_rank: Sequence[str]) -> Topology:
        """This topology with the ranks that run on each host.

        Hosts are matched by name if the names are those of the live hosts (node7 and node7.example.org are one
        name), else by order: the first host of the file is the one with the lowest rank. ConfigurationError
        names both lists if the hosts or their devices do not fit.
        """
        live: dict[str, list[int]] = {}
        for rank, name in enumerate(hostnames_by_rank):
            live.setdefault(name, []).append(rank)
        hosts = self.hosts
        lists = f"{self.described} has the hosts {_listed(hosts)}; the job runs on {', '.join(live)}"
        if len(live) != len(hosts):
            raise ConfigurationError(f"{lists}: {len(hosts)} and {len(live)}; write the hosts of the job in the file")
        found = {name: _same_host(name, live) for name in (host.name for host in hosts)}
        matched = {name: key for name, key in found.items() if key is not None}
        if matched and len(set(matched.values())) < len(hosts):
            missing = ", ".join(name for name in found if name not in matched)
            raise ConfigurationError(
                f"{lists}: the names {missing} are not among them; correct them, or give no host its real name to "
                "match by order"
            )
        order = [matched[host.name] for host in hosts] if matched else list(live)
        ranks = {host.name: tuple(live[name]) for host, name in zip(hosts, order, strict=True)}
        for host, name in zip(hosts, order, strict=True):
            if host.devices != len(live[name]):
                raise ConfigurationError(
                    f"{self.described}: host {host.name!r} has devices: {host.devices}, but {len(live[name])} "
                    f"ranks run on {name}; write devices: {len(live[name])}, or start {host.devices} processes there"
                )
        clusters = tuple(
            replace(cluster, hosts=tuple(replace(host, ranks=ranks[host.name]) for host in cluster.hosts))
            for cluster in self.clusters
        )
        return replace(self, clusters=clusters)

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
        except (OSError, ValueError) as error:  # bytes that are no text, a path with a zero
            raise ConfigurationError(f"the topology file {path} cannot be read: {error}") from error
        return cls.from_yaml_text(text, source=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "topology") -> Topology:
        """Read a topology from YAML text; source is the name that messages use for it."""
        document = YamlText(text, source=source)
        entries = _write_out_counts(document)

        def origin(place: Place) -> Place:
            if len(place) < 4 or place[0] != "clusters" or place[2] != "hosts":
                return place
            _, cluster, _, host, *rest = place
            return ("clusters", cluster, "hosts", entries[cluster][host], *rest)

        topology = document.read(cls, origin, beside={"devices": "count"})
        if topology.source is not None:
            raise document.error(("source",), "unknown key 'source'", at_key=True)
        return replace(topology, source=source)

    def to_yaml(self) -> str:
        """YAML text that from_yaml_text reads back as an equal topology. Every host is written out."""
        data = to_data(replace(self, source=None), aliases=True)
        return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def to_json(self) -> str:
        """JSON for other processes; the keys are those of the dataclasses."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> Topology:
        """Read what to_json wrote; source says in messages whose text it is."""
        return read_json(cls, text, source=source)


def _write_out_counts(document: YamlText) -> dict[Any, dict[Any, int]]:
    """Put as many hosts as an entry's ``count`` says in its place, named with a number each.

    Returns for each cluster the entry that each of its hosts is from.
    """
    found: dict[Any, dict[Any, int]] = {}
    clusters = document.data.get("clusters") if isinstance(document.data, dict) else None
    for i, cluster in enumerate(clusters if isinstance(clusters, list) else ()):
        if not isinstance(cluster, dict) or not isinstance(cluster.get("hosts"), list):
            continue
        hosts: list[Any] = []
        found[i] = {}
        for j, host in enumerate(cluster["hosts"]):
            names: list[str | None] = [None]
            role = host.pop("role", "worker") if isinstance(host, dict) else "worker"
            if role not in ("worker", "optimizer"):
                problem = f"{role!r} is not allowed; write optimizer, or leave it out"
                raise document.error(("clusters", i, "hosts", j, "role"), problem)
            if isinstance(host, dict) and "count" in host:
                count, place = host.pop("count"), ("clusters", i, "hosts", j)
                if type(count) is not int or not 1 <= count <= _MAX_COUNT:
                    problem = f"{count!r} is not allowed; write a whole number from 1 to {_MAX_COUNT}"
                    raise document.error((*place, "count"), problem)
                if "ranks" in host:
                    problem = "ranks belong to one host; write hosts with ranks out, without a count"
                    raise document.error((*place, "ranks"), problem)
                names = [f"{host.get('name')}-{number}" for number in range(count)]
            if role == "optimizer":
                different = sorted(set(host) - {"name"})
                if different:
                    problem = f"a host with role: optimizer has a name, and perhaps a count, but no {different[0]}"
                    raise document.error(("clusters", i, "hosts", j, different[0]), problem, at_key=True)
                alike = [
                    {"name": host.get("name") if name is None else name, "cluster": cluster.get("name")}
                    for name in names
                ]
                document.data["optimizer_hosts"] = [*document.data.get("optimizer_hosts", ()), *alike]
                continue
            found[i] |= dict.fromkeys(range(len(hosts), len(hosts) + len(names)), j)
            hosts += [host if name is None else {**host, "name": name} for name in names]
        cluster["hosts"] = hosts
    return found


def _check_ends(ends: Sequence[str], rule: str, names: Sequence[str], place: Place) -> None:
    unknown = [end for end in ends if end not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PlacedError(f"{rule}, which are {', '.join(names[:20])}{hint}", place)


def _listed(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


def _same_host(name: str, live: dict[str, list[int]]) -> str | None:
    """The live host that a name means: itself, or the only one that is alike up to the domain."""
    if name in live:
        return name
    short = [other for other in live if other.split(".")[0] == name.split(".")[0] and ("." in other) != ("." in name)]
    return short[0] if len(short) == 1 else None
