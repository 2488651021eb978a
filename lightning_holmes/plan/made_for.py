"""MadeFor: the module and the clusters that a plan was made for, so that it can be refused for others. Plain data.

MadeFor(module="GPT", num_parameters=852_736, clusters=cluster_facts(topology))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from lightning_holmes.cluster.record import Text, record
from lightning_holmes.cluster.topology import Topology


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A cluster: its number of hosts, and the kinds of network cards that all hosts have; empty if not known."""

    name: Text
    hosts: Annotated[int, Field(ge=1)]
    cards: tuple[Text, ...] = ()


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """The module and clusters of a plan. module: the LightningModule's class name. None or empty: not known, and not compared."""

    module: Text | None = None
    num_parameters: Annotated[int | None, Field(ge=0)] = None
    clusters: tuple[ClusterFacts, ...] = ()

    def differences(self, here: MadeFor) -> list[str]:
        """The differences between this plan's origin and ``here``, as messages."""
        found = []
        if self.module is not None and here.module is not None and self.module != here.module:
            found.append(f"it was made for the module {self.module}, this one is {here.module}")
        if None not in (self.num_parameters, here.num_parameters) and self.num_parameters != here.num_parameters:
            found.append(f"its module has {self.num_parameters:,} parameters, this one has {here.num_parameters:,}")
        clusters = {cluster.name: cluster for cluster in here.clusters}
        for mine in self.clusters:
            other = clusters.get(mine.name)
            if other is None:
                continue  # the placement of ranks is compared elsewhere (plan_check.py)
            if mine.hosts != other.hosts:
                found.append(f"its cluster {mine.name} has {mine.hosts} hosts, here that has {other.hosts}")
            # a topology file may leave out Ethernet
            theirs = set(mine.cards) - {"ethernet"}, set(other.cards) - {"ethernet"}
            if mine.cards and other.cards and theirs[0] != theirs[1]:
                shown = [" and ".join(sorted(kinds)) or "ethernet alone" for kinds in theirs]
                found.append(f"the hosts of its cluster {mine.name} have {shown[0]}, here they have {shown[1]}")
        return found


def cluster_facts(topology: Topology) -> tuple[ClusterFacts, ...]:
    """The facts of each cluster of a topology."""
    found = []
    for cluster in topology.clusters:
        # cards that are down count: they may come up again
        kinds = [{nic.kind for nic in host.nics} for host in cluster.hosts]
        cards = tuple(sorted(set.intersection(*kinds)))
        found.append(ClusterFacts(name=cluster.name, hosts=len(cluster.hosts), cards=cards))
    return tuple(found)
