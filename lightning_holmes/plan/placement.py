"""Placement: the coordinate of each global rank in the pipeline x data-parallel x tensor-parallel grid.

It owns the order of the ranks. comm builds process groups from it.

    topology = Topology.single_cluster(num_hosts=1, devices_per_host=4)
    placement = make_placement(topology, world_size=4, pipeline_parallel_size=2)
    placement.grid                      # ((0, 1), (2, 3))
    placement.coordinate(2)             # (1, 0, 0): pipeline rank 1, data-parallel rank 0, tensor-parallel rank 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_holmes.cluster.network import fabric_of
from lightning_holmes.cluster.topology import TRANSPORT_KINDS, Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.run_shape import Layout

Fabric = tuple[int, str]
"""(rank of its kind of card, the fastest kind first; name)."""
Fabrics = frozenset[Fabric]
"""The fabrics that a host is on."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A grid of global ranks: grid[pipeline_rank] holds the ranks of a pipeline rank, tensor group by tensor group; each rank
    appears once. The ranks of data-parallel and tensor groups ascend, since torch sorts the ranks of a process group: a member's
    place in the group is its coordinate. Those of a pipeline, a column of the grid, may come in any order.

    With tensor-parallel size t, the global rank is ``grid[pipeline_rank][data_parallel_rank * t + tensor_parallel_rank]``.
    """

    grid: tuple[tuple[int, ...], ...]
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        ranks = sorted(rank for row in self.grid for rank in row)
        if not ranks or len({len(row) for row in self.grid}) != 1 or ranks != list(range(len(ranks))):
            raise ConfigurationError(
                f"placement {[list(row) for row in self.grid]}: the rows must be of one length and hold "
                "every rank from 0 on once"
            )
        if self.tensor_parallel_size < 1 or len(self.grid[0]) % self.tensor_parallel_size:
            raise ConfigurationError(
                f"placement: rows of {len(self.grid[0])} ranks are not made of tensor groups of {self.tensor_parallel_size}"
            )
        size = self.tensor_parallel_size
        for row in self.grid:
            tensor_groups = [row[start : start + size] for start in range(0, len(row), size)]
            if any(
                list(group) != sorted(group) for group in (*tensor_groups, *(row[part::size] for part in range(size)))
            ):
                raise ConfigurationError(
                    f"placement {list(row)}: the ranks of a tensor group and those of a data-parallel group must ascend; number the "
                    f"processes host by host, as torchrun does"
                )

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of rows of the grid."""
        return len(self.grid)

    @property
    def data_parallel_size(self) -> int:
        """The number of tensor groups in a row of the grid, which is the number of replicas of the model."""
        return len(self.grid[0]) // self.tensor_parallel_size

    @property
    def world_size(self) -> int:
        """The number of ranks of the grid."""
        return len(self.grid) * len(self.grid[0])

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pipeline_rank, data_parallel_rank, tensor_parallel_rank) of a global rank. Raises ValueError if it is not in the grid."""
        for pipeline_rank, row in enumerate(self.grid):
            if rank in row:
                return pipeline_rank, *divmod(row.index(rank), self.tensor_parallel_size)
        raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of this placement")

    def pipeline_group(self, data_parallel_rank: int, tensor_parallel_rank: int = 0) -> tuple[int, ...]:
        """The ranks of one pipeline, first stage first; a replica of the model has one for each tensor-parallel rank."""
        column = data_parallel_rank * self.tensor_parallel_size + tensor_parallel_rank
        return tuple(row[column] for row in self.grid)

    def data_parallel_group(self, pipeline_rank: int, tensor_parallel_rank: int = 0) -> tuple[int, ...]:
        """The ranks that hold the same part of the same stages and sum their gradients."""
        return self.grid[pipeline_rank][tensor_parallel_rank :: self.tensor_parallel_size]

    def tensor_parallel_group(self, pipeline_rank: int, data_parallel_rank: int) -> tuple[int, ...]:
        """The ranks over which the layers of a replica's stages are sharded."""
        first = data_parallel_rank * self.tensor_parallel_size
        return self.grid[pipeline_rank][first : first + self.tensor_parallel_size]


def make_placement(
    topology: Topology, *, world_size: int, pipeline_parallel_size: int, tensor_parallel_size: int = 1
) -> Placement:
    """Place the pipeline across clusters, and keep data-parallel groups inside a cluster and tensor groups inside a host.

    Ranks are ordered by cluster, RDMA fabric of the host, host and rank; with N ranks, p pipeline ranks and t
    tensor-parallel ranks, tensor groups are t consecutive ranks of a host, pipeline rank s holds the ranks
    [s*N/p, (s+1)*N/p) of that order, its data-parallel groups stride by t inside it, and pipeline j is {j, j+N/p, ...}
    (Holmes, arXiv 2312.03549, its groups). A data-parallel group thus stays inside a cluster wherever N/p divides the
    sizes of the clusters. Where it does not, the hosts of one fabric in a cluster still get as many stages of their own
    as they can hold; the remaining ranks form stages on one fabric across clusters, then stages inside one cluster, and
    finally stages that cross clusters. A host whose RDMA cards are down is on no fabric.

    With hosts on one fabric each, no layout has fewer stages that leave a fabric. Where hosts are on several, those on the same ones
    form stages; a layout with fewer may exist.
    Clusters and hosts are taken in the order of the topology, so that the launcher's numbering of nodes only changes the order of
    replicas.

    Raises ConfigurationError if the sizes do not divide world_size, if tensor_parallel_size does not divide the devices
    of each host, or if the topology has another number of devices.
    """
    if topology.num_devices != world_size:
        sizes = ", ".join(f"{cluster.name}: {cluster.num_devices}" for cluster in topology.clusters)
        raise ConfigurationError(
            f"{topology.described} has {topology.num_devices} devices ({sizes}), but the world size is "
            f"{world_size}; correct its hosts and devices, or Trainer(num_nodes=..., devices=...)"
        )
    check_tensor_size(topology, tensor_parallel_size)
    num_groups = world_size // tensor_parallel_size
    if pipeline_parallel_size < 1 or num_groups % pipeline_parallel_size:
        divisors = ", ".join(str(size) for size in range(1, num_groups + 1) if num_groups % size == 0)
        world = f"the world size {world_size}"
        if tensor_parallel_size > 1:
            world = f"the {num_groups} tensor groups of {tensor_parallel_size} in {world}"
        raise ConfigurationError(
            f"pipeline_parallel_size={pipeline_parallel_size} does not divide {world}; these would: {divisors}"
        )
    size = world_size // pipeline_parallel_size
    left = _places(topology)
    stages: list[_Stage] = []
    for in_one_cluster, on_same_fabrics in ((True, True), (False, True), (True, False), (False, False)):
        together: dict[tuple[int, Fabrics | None], list[_Place]] = {}
        for place in left:
            key = place.cluster if in_one_cluster else 0, place.fabrics if on_same_fabrics else None
            together.setdefault(key, []).append(place)
        left = []
        for places in together.values():
            found, rest = _cut(places, size)
            stages += found
            left += rest
    stages.sort()
    rows = []
    for stage in stages:
        starts = range(0, size, tensor_parallel_size)
        tensor_groups = sorted(stage.ranks[start : start + tensor_parallel_size] for start in starts)
        rows.append(tuple(rank for group in tensor_groups for rank in group))
    return Placement(tuple(rows), tensor_parallel_size)


def layout_of(placement: Placement, topology: Topology) -> Layout:
    """The layout of a placement: its ranks as devices in the order of the topology."""
    order = [rank for host in topology.hosts for rank in topology.ranks_of_host(host.name)]
    device = {rank: index for index, rank in enumerate(order)}
    return Layout(
        pipeline=placement.pipeline_parallel_size,
        tensor=placement.tensor_parallel_size,
        data=placement.data_parallel_size,
        grid=tuple(tuple(device[rank] for rank in row) for row in placement.grid),
    )


def is_plain(topology: Topology, stage_size: int) -> bool:
    """Whether stages of stage_size devices are placed in the order of the topology: stage_size divides every cluster, and the hosts of
    a cluster are on the same fabrics. A fast check that does not look at each rank, of which there may be thousands."""
    return all(
        cluster.num_devices % stage_size == 0 and len({_fabrics(cluster, host) for host in cluster.hosts}) == 1
        for cluster in topology.clusters
    )


class _Place(NamedTuple):
    """A rank, with the cluster (index), position in the topology and fabrics of its host."""

    cluster: int
    host: int
    rank: int
    fabrics: Fabrics


class _Stage(NamedTuple):
    """The ranks of a stage. Stages sort by the cluster, fabric, host and rank of their first rank."""

    cluster: int
    fabric: Fabric
    host: int
    ranks: tuple[int, ...]


def _places(topology: Topology) -> list[_Place]:
    """All ranks by cluster, host and rank."""
    ranks: dict[str, list[int]] = {}
    for rank, (_, host) in enumerate(topology.places()):
        ranks.setdefault(host.name, []).append(rank)
    hosts = [(index, cluster, host) for index, cluster in enumerate(topology.clusters) for host in cluster.hosts]
    return [
        _Place(index, position, rank, fabrics)
        for position, (index, cluster, host) in enumerate(hosts)
        for fabrics in [_fabrics(cluster, host)]
        for rank in ranks[host.name]
    ]


def _fabrics(cluster: Cluster, host: Host) -> Fabrics:
    """The RDMA fabrics that a host's working cards are on; if there are none, a placeholder for the Ethernet of its cluster."""
    return frozenset(
        (TRANSPORT_KINDS.index(nic.kind), fabric_of(nic, cluster.name))
        for nic in host.nics
        if nic.kind != "ethernet" and nic.up
    ) or frozenset({(len(TRANSPORT_KINDS), f"none in {cluster.name}")})


def _cut(places: list[_Place], size: int) -> tuple[list[_Stage], list[_Place]]:
    """Form stages of ``size`` places, sorted by cluster and fabric; also return the rest."""
    places = sorted(places, key=lambda place: (place.cluster, min(place.fabrics), place.host, place.rank))
    whole = len(places) - len(places) % size
    stages = []
    for start in range(0, whole, size):
        first = places[start]
        ranks = tuple(place.rank for place in places[start : start + size])
        stages.append(_Stage(first.cluster, min(first.fabrics), first.host, ranks))
    return stages, places[whole:]


def check_tensor_size(topology: Topology, tensor_parallel_size: int) -> None:
    """Raise ConfigurationError unless each host holds whole tensor groups."""
    for host in topology.hosts:
        if host.devices % tensor_parallel_size:
            common = math.gcd(*(other.devices for other in topology.hosts))
            fitting = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            raise ConfigurationError(
                f"tensor_parallel_size={tensor_parallel_size} does not divide the {host.devices} devices of host "
                f"{host.name}: a tensor group stays inside a host; these sizes would fit every host: {fitting}"
            )


def choose_pipeline_size(topology: Topology, tensor_parallel_size: int = 1) -> tuple[int, str]:
    """Choose the pipeline-parallel size for these clusters; also return the reason.

    The number of ranks of a stage is the greatest common divisor of the clusters' sizes, so that no data-parallel group
    leaves its cluster: with clusters of equal size, one stage per cluster. If that would make more than twice as many stages as
    there are clusters (56 and 64 devices: 15), it is one for each cluster or the next possible number, and some groups cross.
    Hosts, and so stages, hold whole tensor groups.

    Raises ConfigurationError if tensor_parallel_size does not divide the devices of each host.
    """
    check_tensor_size(topology, tensor_parallel_size)
    sizes = [cluster.num_devices for cluster in topology.clusters]
    stage = math.gcd(*sizes)
    size = sum(sizes) // stage
    if size == len(sizes):
        return size, f"{size}, one for each cluster"
    shown = ", ".join(f"{cluster.name}: {cluster.num_devices}" for cluster in topology.clusters[:8])
    if size > 2 * len(sizes):
        num_groups = sum(sizes) // tensor_parallel_size
        fewer = next((count for count in range(len(sizes), 2 * len(sizes) + 1) if num_groups % count == 0), size)
        if fewer < size:
            of_each = "one for each cluster nearly" if fewer == len(sizes) else f"for {len(sizes)} clusters"
            return fewer, f"{fewer}, {of_each}: stages that divide every cluster ({shown}) would be {size}"
    reason = f"{size}: a stage of {stage} rank{'s' * (stage > 1)} divides every cluster ({shown})"
    if stage == tensor_parallel_size:
        reason += "; no good layout, there are no replicas. " + alternatives(topology, tensor_parallel_size)
    return size, reason


def alternatives(topology: Topology, tensor_parallel_size: int = 1) -> str:
    """Describe alternatives for clusters whose sizes have no useful common divisor."""
    sizes = {cluster.name: cluster.num_devices for cluster in topology.clusters}
    total, smallest = sum(sizes.values()), min(sizes.values())
    num_groups = total // tensor_parallel_size
    options = []
    extra = {name: size % smallest for name, size in sizes.items() if size % smallest}
    if extra and smallest > tensor_parallel_size:
        spare = ", ".join(f"{count} of {name}" for name, count in extra.items())
        options.append(f"leave {spare} idle, for stages of {smallest} ranks")
    for size in (len(sizes), 2, 1):
        if num_groups % size == 0 and size < num_groups and not any(f"={size} " in option for option in options):
            options.append(f"pipeline_parallel_size={size} (gradients cross clusters, over Ethernet)")
    return "Alternatives: " + "; ".join(options[:3])


def crossing_groups(placement: Placement, topology: Topology) -> list[int]:
    """The pipeline ranks whose data-parallel groups lie in several clusters."""
    names = [cluster.name for cluster, _ in topology.places()]
    return [stage for stage, row in enumerate(placement.grid) if len({names[rank] for rank in row}) > 1]


def clusters_of(placement: Placement, topology: Topology, pipeline_rank: int) -> tuple[str, ...]:
    """The names of the clusters that a pipeline rank's devices are in, in topology order."""
    places = topology.places()
    touched = {places[rank][0].name for rank in placement.grid[pipeline_rank]}
    return tuple(cluster.name for cluster in topology.clusters if cluster.name in touched)


def cluster_levels(ranks: Sequence[int], clusters: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """The two levels of a hierarchical reduction: the ranks of a group in each cluster, and the ranks at the same position in each.

    Both are empty unless there are several clusters with equally many members, two or more, in each. ``clusters``: of each global rank.
    """
    inside: dict[str, list[int]] = {}
    for rank in ranks:
        inside.setdefault(clusters[rank], []).append(rank)
    sizes = {len(members) for members in inside.values()}
    if len(inside) == 1 or len(sizes) > 1 or sizes == {1}:
        return [], []
    return list(inside.values()), [list(peers) for peers in zip(*inside.values(), strict=True)]


def clusters_of_stages(placement: Placement, clusters: Sequence[str]) -> list[str | None]:
    """For each pipeline rank the cluster that holds all of its replicas; None if several do. ``clusters``: of each global rank."""
    found = []
    for stage in range(placement.pipeline_parallel_size):
        of_stage = {clusters[rank] for rank in placement.data_parallel_group(stage, 0)}
        found.append(next(iter(of_stage)) if len(of_stage) == 1 else None)
    return found
