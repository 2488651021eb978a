"""MadeFor: which module and which clusters a plan was made for, to refuse it for others. Plain data.

MadeFor(module="GPT", num_parameters=852_736, clusters=cluster_facts(topology))
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.cluster.yaml_node import YamlNode


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A cluster: its hosts, and the kinds of cards that all of them have; none: they are not known."""

    name: str
    hosts: int
    cards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """module: the LightningModule's class. What is None or empty is not known, and not compared."""

    module: str | None = None
    num_parameters: int | None = None
    clusters: tuple[ClusterFacts, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Plain data for YAML."""
        clusters = [{**asdict(cluster), "cards": list(cluster.cards)} for cluster in self.clusters]
        data = {"module": self.module, "num_parameters": self.num_parameters, "clusters": clusters}
        return {key: value for key, value in data.items() if value is not None}

    @classmethod
    def read(cls, node: YamlNode) -> MadeFor:
        """Read what to_data gave; any key may be left out."""
        entries = node.mapping(required=(), optional=("module", "num_parameters", "clusters"))
        return cls(
            module=entries["module"].text() if "module" in entries else None,
            num_parameters=entries["num_parameters"].integer(minimum=0) if "num_parameters" in entries else None,
            clusters=tuple(_read_cluster(entry) for entry in entries["clusters"].items())
            if "clusters" in entries
            else (),
        )

    def differences(self, here: MadeFor) -> list[str]:
        """What was otherwise where this plan was made, in words."""
        found = []
        if self.module is not None and here.module is not None and self.module != here.module:
            found.append(f"it was made for the module {self.module}, this one is {here.module}")
        if None not in (self.num_parameters, here.num_parameters) and self.num_parameters != here.num_parameters:
            found.append(f"its module has {self.num_parameters:,} parameters, this one has {here.num_parameters:,}")
        clusters = {cluster.name: cluster for cluster in here.clusters}
        for mine in self.clusters:
            other = clusters.get(mine.name)
            if other is None:
                continue  # where ranks lie is compared by itself
            if mine.hosts != other.hosts:
                found.append(f"its cluster {mine.name} has {mine.hosts} hosts, here that has {other.hosts}")
            theirs = set(mine.cards) - {"ethernet"}, set(other.cards) - {"ethernet"}  # which a file may leave out
            if mine.cards and other.cards and theirs[0] != theirs[1]:
                shown = [" and ".join(sorted(kinds)) or "ethernet alone" for kinds in theirs]
                found.append(f"the hosts of its cluster {mine.name} have {shown[0]}, here they have {shown[1]}")
        return found


def cluster_facts(topology: Topology) -> tuple[ClusterFacts, ...]:
    """The clusters of a topology."""
    found = []
    for cluster in topology.clusters:
        kinds = [{nic.kind for nic in host.nics} for host in cluster.hosts]  # one that is down may come up again
        cards = tuple(sorted(set.intersection(*kinds)))
        found.append(ClusterFacts(name=cluster.name, hosts=len(cluster.hosts), cards=cards))
    return tuple(found)


def _read_cluster(node: YamlNode) -> ClusterFacts:
    entries = node.mapping(required=("name", "hosts"), optional=("cards",))
    cards = tuple(entry.text() for entry in entries["cards"].items()) if "cards" in entries else ()
    return ClusterFacts(name=entries["name"].text(), hosts=entries["hosts"].integer(minimum=1), cards=cards)
