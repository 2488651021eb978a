"""JobLayout: the topology, placement, transports and process groups of a job, known before any module.

layout = lay_out_job(topology, options.asked, connection, facts=facts)      # every rank must call
layout.placement, layout.groups, layout.transports
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes.cluster.inventory import ProbeOptions, discover_topology
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.mesh import GroupBuilder, ProcessGroups, build_process_groups, p2p_pairs
from lightning_holmes.comm.user_settings import set_own
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.placement import (
    Placement,
    alternatives,
    choose_pipeline_size,
    cluster_levels,
    crossing_groups,
    make_placement,
)
from lightning_holmes.plan.transport import TransportChooser
from lightning_holmes.strategy import agreement
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.torch_private import default_store


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """The layout of a job.

    Attributes:
        pairs: the ordered pairs of pipeline ranks between which tensors may be sent.
        notes: the choices that were made, and why.
        num_hosts: the number of hosts of the job, whatever hosts a topology file lists.
        is_gloo: tensors are sent by gloo, over sockets.
    """

    topology: Topology
    placement: Placement
    transports: GroupTransports
    groups: ProcessGroups
    pairs: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    num_hosts: int = 1
    is_gloo: bool = True


def find_topology(argument: str | Topology, connection: Connection, *, measures_links: bool) -> Topology:
    """Return the topology: discovered, or given and matched with the hosts of the connection. Every rank must call.

    If all ranks are on one host, nothing is discovered: a file may lay them out as several clusters.

    Args:
        argument: HolmesStrategy's ``topology``.
        measures_links: measure the links, unless the file states their speeds.
    """
    given = None
    if isinstance(argument, Topology):
        given = argument
    elif argument != "auto":
        given = Topology.from_yaml(argument)
    if connection.inventory is None:
        hosts = connection.num_nodes
        return given or Topology.single_cluster(hosts, max(1, connection.world_size // hosts))
    timeout = connection.options.timeout
    return discover_topology(
        default_store(),
        connection.rank,
        connection.world_size,
        local=connection.inventory,
        given=given,
        options=ProbeOptions(measure=measures_links),
        timeout_s=120.0 if timeout is None else min(120.0, timeout.total_seconds()),
    )


def lay_out_job(
    topology: Topology,
    asked: Asked,
    connection: Connection,
    *,
    facts: Mapping[str, str],
    sent_dtype: torch.dtype | None = None,
) -> JobLayout:
    """Place the ranks and build their groups. Every rank must call, with the same arguments.

    Args:
        facts: values by name that must be the same on all ranks; compared before groups are built, which would hang otherwise.
        sent_dtype: the dtype in which tensors between stages are sent from one cluster to another; None: their own.

    Raises:
        ConfigurationError: the sizes do not fit, or the user's settings contradict what a group needs.
    """
    tensor_parallel_size = asked.tensor_parallel_size
    notes = []
    if asked.pipeline_parallel_size == "auto":
        size, reason = choose_pipeline_size(topology, tensor_parallel_size)
        hint = "" if size > 1 else "; for a pipeline give pipeline_parallel_size, or a topology with several clusters"
        notes.append(f"pipeline_parallel_size: {reason}{hint}")
    else:
        size = asked.pipeline_parallel_size
    placement = make_placement(
        topology,
        world_size=connection.world_size,
        pipeline_parallel_size=size,
        tensor_parallel_size=tensor_parallel_size,
    )
    if size == 1 and asked.num_chunks != "auto" and asked.num_chunks > 1 and not asked.is_layered:
        raise ConfigurationError(
            f"num_chunks={asked.num_chunks} needs a pipeline of two or more ranks, but pipeline_parallel_size is 1; one rank "
            f'holds several stages with schedule="breadth_first"'
        )
    crossing = crossing_groups(placement, topology)
    if crossing:
        notes.append(
            f"the data-parallel groups of pipeline rank {', '.join(map(str, crossing[:8]))} reach over several clusters, "
            f"so their gradients cross between them. {alternatives(topology, tensor_parallel_size)}"
        )
    notes += topology.warnings
    chooser = None if connection.inventory is None else TransportChooser(topology, sockets=connection.backend == "gloo")
    transports = GroupTransports(chooser, rank=connection.rank, backend=connection.backend, user=connection.user)
    replicas = [placement.data_parallel_group(stage, t) for stage in range(size) for t in range(tensor_parallel_size)]
    columns = [(d, t) for d in range(placement.data_parallel_size) for t in range(tensor_parallel_size)]
    pipelines = [placement.pipeline_group(*column) for column in columns]
    tensors = [
        placement.tensor_parallel_group(stage, replica)
        for stage in range(size)
        for replica in range(placement.data_parallel_size)
    ]
    pairs = p2p_pairs(size, asked.largest_num_chunks if size > 1 else 1, asked.placing_schedule)
    p2p = [(ranks[a], ranks[b]) for ranks in pipelines for a, b in pairs]
    clusters = [cluster.name for cluster, _ in topology.places()]
    if sent_dtype is not None and all(len({clusters[r] for r in group}) == 1 for group in (*p2p, *replicas)):
        notes.append("compression has nothing to do: nothing crosses between clusters, inside which nothing is rounded")
    levels = [members for ranks in replicas for level in cluster_levels(ranks, clusters) for members in level]
    own = [
        group
        for group in (*replicas, *levels, *tensors, *pipelines, *p2p)
        if connection.rank in group and len(group) > 1
    ]
    transports.check_world(range(connection.world_size))
    # before anything is sent over WORLD: NCCL reads its variables with its first communicator
    set_own(transports.nccl_environment(own))
    _warn_of_fallbacks(transports, [group for group in replicas if len(group) > 1])
    agreement.compare_ranks({**facts, **connection.user.facts()}, connection.world_size)
    builder = GroupBuilder(
        rank=connection.rank,
        backend=connection.backend,
        device=connection.device,
        timeout=connection.options.timeout,
        transports=transports,
    )
    groups = build_process_groups(placement, builder, pairs=pairs, clusters=clusters, sent_dtype=sent_dtype)
    return JobLayout(
        topology=topology,
        placement=placement,
        transports=transports,
        groups=groups,
        pairs=tuple(pairs),
        notes=tuple(notes),
        num_hosts=1 if connection.inventory is None else connection.num_nodes,
        is_gloo=connection.backend == "gloo",
    )


def _warn_of_fallbacks(transports: GroupTransports, groups: Sequence[Sequence[int]]) -> None:
    for line in transports.fallbacks(groups):
        pl.utilities.rank_zero_warn(line)


def build_device_mesh(layout: JobLayout, device_type: str) -> DeviceMesh:
    """Return the placement as a DeviceMesh with the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``. Every rank
    must call.

    The mesh uses the process groups of the layout; an axis of one rank gets a group of one.
    """
    groups, placement = layout.groups, layout.placement
    axes = (groups.pipeline, groups.data_parallel, groups.tensor_parallel)
    shape = (placement.pipeline_parallel_size, placement.data_parallel_size, placement.tensor_parallel_size)
    return DeviceMesh.from_group(
        [group or groups.builder.build_single() for group in axes],
        device_type,
        mesh=torch.tensor(placement.grid).view(shape),
        mesh_dim_names=("pipeline", "data_parallel", "tensor_parallel"),
    )
