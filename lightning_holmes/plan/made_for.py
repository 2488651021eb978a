"""MadeFor: which module and which clusters a plan was made for, to refuse it for others. Plain data.

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
    """A cluster: its hosts, and the kinds of cards that all of them have; none: they are not known."""

    name: Text
    hosts: Annotated[int, Field(ge=1)]
    cards: tuple[Text, ...] = ()


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """module: the LightningModule's class. What is None or empty is not known, and not compared."""

    module: Text | None = None
    num_parameters: Annotated[int | None, Field(ge=0)] = None
    clusters: tuple[ClusterFacts, ...] = ()

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
