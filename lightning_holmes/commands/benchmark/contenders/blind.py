"""A pipeline blind to network cards: stages inside clusters, replicas across them, everything on Ethernet.

The node order and the topology file say so: stage s holds the s-th host of every cluster. That is where Megatron-LM's
numbering puts them (pipeline ranks N/p apart) when the launcher numbers the nodes of two clusters in turn.
"""

from lightning.pytorch.strategies import Strategy

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job
from lightning_holmes.strategy import HolmesStrategy


def stages_of(job: Job) -> list[list[str]]:
    """The hosts of each stage."""
    return [[host.name for host in hosts] for hosts in zip(*(c.hosts for c in job.topology.clusters), strict=True)]


def make_strategy(job: Job) -> Strategy:
    """The stages are given as if they were clusters, of hosts without fast cards."""
    clusters = tuple(
        Cluster(name=f"stage{stage}", hosts=tuple(Host(name=name, devices=job.processes_per_host) for name in names))
        for stage, names in enumerate(stages_of(job))
    )
    return HolmesStrategy(topology=Topology(clusters=clusters))


def why_not(job: Job) -> str | None:
    """It needs clusters of one size, with two hosts or more."""
    sizes = {len(cluster.hosts) for cluster in job.topology.clusters}
    if len(sizes) != 1 or sizes == {1}:
        return "needs clusters of one size with two hosts or more"
    return None


def node_order(job: Job) -> list[str]:
    """Stage after stage."""
    return [name for names in stages_of(job) for name in names]


BLIND = Contender(
    name="blind",
    title="pipeline, blind to cards",
    make_strategy=make_strategy,
    node_order=node_order,
    why_not=why_not,
)
