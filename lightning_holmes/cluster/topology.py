"""Topology: which hosts, clusters and links exist. Plain data, read from and written to YAML.

A cluster is a set of hosts that share a fast network; links join clusters. Nothing is decided here: the plan
package decides what runs where. inventory.py discovers the topology of a job; network.py defines its parts.

A topology file:

    clusters:
      - name: berlin
        hosts:
          - name: node            # with a count the hosts are called node-0, node-1, ...
            count: 2              # optional: number of equal hosts
            devices: 8            # processes on each host: one per GPU
            nics:                 # optional
              - {name: mlx5_0, kind: infiniband, bandwidth: 200 Gbit/s}
              - {name: eth0, kind: ethernet, bandwidth: 25 Gbit/s}
      - name: paris
        fabric: roce              # optional: the kind of network that all its hosts share
        hosts:
          - {name: gpu, count: 2, devices: 8, nics: [{name: mlx5_0, kind: roce}]}
          - {name: cpu, role: optimizer}       # optional: no devices; holds parameters and optimizer states
    links:                        # optional: the links between clusters, if known
      - {ends: [berlin, paris], transport: ethernet, bandwidth: 25 Gbit/s, latency: 50 us}

kind and transport are infiniband, roce or ethernet. A bandwidth has a unit (bit/s, B/s, with k, M, G, T, or
Ki, Mi, Gi, Ti before B/s) or is a bare number of bytes per second, at least 100 kB/s. A latency has a unit (s, ms, us, ns) or is
a bare number of seconds, below 1. The speed of a NIC without a bandwidth is not known. Global ranks are assigned
in the order of the file: the first host of the first cluster has the first ranks.

Files written by discovery have more keys, which are all optional: ranks of a host; interface, addresses, up and fabric
of a NIC; fallback and speeds of a cluster; measured of a link;
warnings and measured_at next to clusters. docs/launching.md lists them.
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
)
from lightning_holmes.cluster.record import Place, PlacedError, YamlText, check_unique, record, to_data
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
]

_MAX_COUNT = 100_000  # hosts of one entry; a larger count is a typing error


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All clusters and the links between them.

    Attributes:
        warnings: messages to the user from discovery.
        measured_at_s: Unix time at which its speeds were measured, if they were.
        optimizer_hosts: hosts without devices, which hold parameters and optimizer states.
        source: the file it was read from, for messages only.
    """

    clusters: Annotated[tuple[Cluster, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
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
            unknown = [end for end in link.ends if end not in clusters]
            if unknown:
                near = difflib.get_close_matches(unknown[0], clusters, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                rule = f"link {link.ends} must join two of the clusters, which are {', '.join(clusters[:20])}{hint}"
                raise PlacedError(rule, ("links", i, "ends"))
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
        """The number of devices of all clusters, which is the world size."""
        return sum(cluster.num_devices for cluster in self.clusters)

    def cluster_of_rank(self, rank: int) -> Cluster:
        """The cluster of a global rank: where the launcher started it or, without ``ranks``, by the order of the file."""
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
        """Cluster and host of every rank, by rank. Faster than cluster_of_rank and host_of_rank for all ranks."""
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
        """Return this topology with the ranks that run on each host.

        Hosts are matched by name if the names are those of the live hosts (node7 and node7.example.org are the same
        name), else by order: the first host of the file is the host with the lowest rank. Raises ConfigurationError
        if the hosts or their numbers of devices do not match.
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
        """The name of this topology in messages, with its file if there is one."""
        return f"the topology in {self.source}" if self.source is not None else "the topology"

    @classmethod
    def single_cluster(cls, num_hosts: int, devices_per_host: int) -> Topology:
        """Make one cluster of equal hosts, the assumption if nothing is known."""
        hosts = tuple(Host(name=f"host{index}", devices=devices_per_host) for index in range(num_hosts))
        return cls(clusters=(Cluster(name="cluster0", hosts=hosts),))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Topology:
        """Read a topology file. Raises ConfigurationError, which names file, line, key, value and the fix."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or a path with a null character
            raise ConfigurationError(f"the topology file {path} cannot be read: {error}") from error
        return cls.from_yaml_text(text, source=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "topology") -> Topology:
        """Read a topology from YAML text; source is the name of the text in messages."""
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


def _write_out_counts(document: YamlText) -> dict[Any, dict[Any, int]]:
    """Replace each host entry that has a ``count`` by that many hosts, with numbered names; move optimizer hosts to ``optimizer_hosts``.

    Returns for each cluster the index of the entry from which each of its hosts was made.
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


def _listed(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


def _same_host(name: str, live: dict[str, list[int]]) -> str | None:
    """The live host with this name, or the only live host whose name is equal apart from a domain; None if there is none."""
    if name in live:
        return name
    short = [other for other in live if other.split(".")[0] == name.split(".")[0] and ("." in other) != ("." in name)]
    return short[0] if len(short) == 1 else None
