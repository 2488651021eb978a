"""Placement: which global rank stands at which coordinate of the pipeline x data-parallel grid.

It owns the order of the ranks. Groups of processes are built from it by comm.

    topology = Topology.single_cluster(num_hosts=1, devices_per_host=4)
    placement = make_placement(topology, world_size=4, pipeline_parallel_size=2)
    placement.grid                      # ((0, 1), (2, 3))
    placement.coordinate(2)             # (1, 0): pipeline rank 1, data-parallel rank 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placement:
    """grid[pipeline_rank][data_parallel_rank] is a global rank; each rank from 0 on stands in it once."""

    grid: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for row in self.grid for rank in row)
        if not ranks or len({len(row) for row in self.grid}) != 1 or ranks != list(range(len(ranks))):
            raise ConfigurationError(
                f"placement {[list(row) for row in self.grid]}: the rows must be of one length and hold "
                "every rank from 0 on once"
            )

    @property
    def pipeline_parallel_size(self) -> int:
        """Rows of the grid."""
        return len(self.grid)

    @property
    def data_parallel_size(self) -> int:
        """Columns of the grid."""
        return len(self.grid[0])

    @property
    def world_size(self) -> int:
        """All ranks of the grid."""
        return self.pipeline_parallel_size * self.data_parallel_size

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(pipeline_rank, data_parallel_rank) of a global rank."""
        for pipeline_rank, row in enumerate(self.grid):
            if rank in row:
                return pipeline_rank, row.index(rank)
        raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of this placement")

    def pipeline_group(self, data_parallel_rank: int) -> tuple[int, ...]:
        """The ranks of one pipeline, first stage first: one replica of the model."""
        return tuple(row[data_parallel_rank] for row in self.grid)

    def data_parallel_group(self, pipeline_rank: int) -> tuple[int, ...]:
        """The ranks that hold the same stages and sum their gradients."""
        return self.grid[pipeline_rank]


def make_placement(topology: Topology, *, world_size: int, pipeline_parallel_size: int) -> Placement:
    """Lay the pipeline across the clusters and keep the gradients inside them.

    Ranks are ordered by cluster, host and rank; with N ranks and p pipeline ranks, pipeline rank s holds the
    ranks [s*N/p, (s+1)*N/p) of that order, and pipeline j is {j, j+N/p, ...} (Holmes, arXiv 2312.03549, its
    groups with tensor-parallel size 1). A data-parallel group thus stays inside a cluster wherever N/p divides the
    sizes of the clusters, and no other order does better. Clusters and hosts come in the order of the topology,
    so that the launcher's numbering of nodes does not matter.

    Raises ConfigurationError if pipeline_parallel_size does not divide world_size, or if the topology has
    another number of devices.
    """
    if topology.num_devices != world_size:
        sizes = ", ".join(f"{cluster.name}: {cluster.num_devices}" for cluster in topology.clusters)
        raise ConfigurationError(
            f"{topology.described} has {topology.num_devices} devices ({sizes}), but the world size is "
            f"{world_size}; correct its hosts and devices, or Trainer(num_nodes=..., devices=...)"
        )
    if pipeline_parallel_size < 1 or world_size % pipeline_parallel_size:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ConfigurationError(
            f"pipeline_parallel_size={pipeline_parallel_size} does not divide the world size {world_size}; "
            f"these would: {divisors}"
        )
    clusters = {cluster.name: index for index, cluster in enumerate(topology.clusters)}
    hosts = {host.name: index for index, host in enumerate(topology.hosts)}
    keys = [(clusters[cluster.name], hosts[host.name]) for cluster, host in topology.places()]
    order = sorted(range(world_size), key=lambda rank: (keys[rank], rank))
    size = world_size // pipeline_parallel_size
    return Placement(tuple(tuple(order[stage * size : (stage + 1) * size]) for stage in range(pipeline_parallel_size)))


def choose_pipeline_size(topology: Topology) -> tuple[int, str]:
    """The size of the pipeline for these clusters, and why.

    A stage has as many ranks as divide every cluster, so that no data-parallel group leaves its cluster: with
    clusters of one size that is a stage for each cluster.
    """
    sizes = [cluster.num_devices for cluster in topology.clusters]
    stage = math.gcd(*sizes)
    size = sum(sizes) // stage
    if size == len(sizes):
        return size, f"{size}, one for each cluster"
    shown = ", ".join(f"{cluster.name}: {cluster.num_devices}" for cluster in topology.clusters[:8])
    reason = f"{size}: a stage of {stage} rank{'s' * (stage > 1)} divides every cluster ({shown})"
    if stage == 1:
        reason += "; no good layout, there are no replicas. " + alternatives(topology)
    return size, reason


def alternatives(topology: Topology) -> str:
    """What else could be done where the sizes of the clusters have no useful common divisor."""
    sizes = {cluster.name: cluster.num_devices for cluster in topology.clusters}
    total, smallest = sum(sizes.values()), min(sizes.values())
    options = []
    extra = {name: size % smallest for name, size in sizes.items() if size % smallest}
    if extra and smallest > 1:
        spare = ", ".join(f"{count} of {name}" for name, count in extra.items())
        options.append(f"leave {spare} idle, for stages of {smallest} ranks")
    for size in (len(sizes), 2, 1):
        if total % size == 0 and size < total and not any(f"={size} " in option for option in options):
            options.append(f"pipeline_parallel_size={size} (gradients cross clusters, over Ethernet)")
    return "Alternatives: " + "; ".join(options[:3])


def crossing_groups(placement: Placement, topology: Topology) -> list[int]:
    """The pipeline ranks whose data-parallel group touches several clusters."""
    names = [cluster.name for cluster, _ in topology.places()]
    return [stage for stage, row in enumerate(placement.grid) if len({names[rank] for rank in row}) > 1]


def clusters_of(placement: Placement, topology: Topology, pipeline_rank: int) -> tuple[str, ...]:
    """The names of the clusters that a pipeline rank's data-parallel group touches, in topology order."""
    places = topology.places()
    touched = {places[rank][0].name for rank in placement.data_parallel_group(pipeline_rank)}
    return tuple(cluster.name for cluster in topology.clusters if cluster.name in touched)
