"""Job: the clusters, the placement of ranks and the process groups of this job, known before any module.

    job = Job(connection, options)               # every rank must call, once; later runs use it again
    job.placement.data_parallel_size, job.groups.pipeline
    with job.explaining(job.groups.data_parallel): ...

The connection to other processes is made by connection.py, groups by comm/mesh.py.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes import checkpoint
from lightning_holmes.cluster.inventory import discover_topology
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.mesh import GroupBuilder, ProcessGroups, build_process_groups, p2p_pairs, release
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
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes
from lightning_holmes.strategy.options import Options
from lightning_holmes.torch_private import default_store


class Job:
    """The job that this process is part of. Its process groups live as long as the job, since metrics and checkpoints use them after a run.

    Attributes:
        topology, placement, groups: the clusters, the ranks' places, and this rank's process groups.
        clusters: the name of each global rank's cluster.
        pairs: the ordered pairs of pipeline ranks between which tensors may be sent.
        transports: the network card of each group.
        notes: the choices that were made, and why.
        num_hosts: the number of hosts of the job, whatever hosts a topology file lists.
        is_gloo: tensors are sent by gloo, over sockets.
        device_mesh: the DeviceMesh with the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``; None for one process.

    Raises:
        ConfigurationError: the options do not fit the clusters, ranks were given different options, or the user's settings contradict what a
            group needs.
    """

    def __init__(self, connection: Connection, options: Options) -> None:
        asked = options.asked
        self.connection = connection
        # the layout of groups needs no link speeds, but choices by predicted cost do
        measures_links = asked.leaves_open and asked.pipeline_parallel_size != 1
        self.topology = topology = find_topology(options.topology, connection, measures_links=measures_links)
        options.check_given_plan(topology, world_size=connection.world_size)
        self.clusters = [cluster.name for cluster, _ in topology.places()]
        self.num_hosts = 1 if connection.inventory is None else connection.num_nodes
        self.is_gloo = connection.backend == "gloo"
        self.placement, self.notes = _place(topology, asked, connection.world_size)
        size = self.placement.pipeline_parallel_size
        self.pairs = tuple(p2p_pairs(size, asked.largest_num_chunks if size > 1 else 1, asked.placing_schedule))
        chooser = None if connection.inventory is None else TransportChooser(topology, sockets=self.is_gloo)
        self.transports = GroupTransports(
            chooser, rank=connection.rank, backend=connection.backend, user=connection.user
        )
        self._set_up_transports(options)
        chosen = {"topology": topology.to_yaml(), "process_group_backend": connection.backend}
        facts = {f"HolmesStrategy({name}=)": repr(value) for name, value in (options.arguments() | chosen).items()}
        # compared before groups are built: that would hang if they differed
        facts = agreement.version_facts() | facts | connection.user.facts()
        agreement.compare_ranks(facts, connection.world_size)
        builder = GroupBuilder(
            rank=connection.rank,
            backend=connection.backend,
            device=connection.device,
            timeout=options.timeout,
            transports=self.transports,
        )
        self.groups = build_process_groups(
            self.placement, builder, pairs=self.pairs, clusters=self.clusters, sent_dtype=options.sent_dtype
        )
        connection.watch_cards(builder.fast_cards())
        weakref.finalize(self, release, builder.owned).atexit = False
        self.device_mesh = None if connection.world_size == 1 else _build_device_mesh(self.groups, self.placement)
        self._nodes: OptimizerNodes | None = None

    def _set_up_transports(self, options: Options) -> None:
        """Prepare the network libraries for this rank's groups, before anything is sent over WORLD: NCCL reads its variables with its first
        communicator."""
        placement, rank = self.placement, self.connection.rank
        size, tensor_size = placement.pipeline_parallel_size, placement.tensor_parallel_size
        replicas = [placement.data_parallel_group(stage, t) for stage in range(size) for t in range(tensor_size)]
        columns = [(d, t) for d in range(placement.data_parallel_size) for t in range(tensor_size)]
        pipelines = [placement.pipeline_group(*column) for column in columns]
        tensors = [
            placement.tensor_parallel_group(stage, replica)
            for stage in range(size)
            for replica in range(placement.data_parallel_size)
        ]
        p2p = [(ranks[a], ranks[b]) for ranks in pipelines for a, b in self.pairs]
        crossing = [group for group in (*p2p, *replicas) if len({self.clusters[r] for r in group}) > 1]
        if options.sent_dtype is not None and not crossing:
            self.notes.append(
                "compression has nothing to do: it rounds what crosses between clusters, and nothing does"
            )
        levels = [members for ranks in replicas for level in cluster_levels(ranks, self.clusters) for members in level]
        groups = (*replicas, *levels, *tensors, *pipelines, *p2p)
        self.transports.check_world(range(placement.world_size))
        set_own(self.transports.nccl_environment([group for group in groups if rank in group and len(group) > 1]))
        for line in self.transports.fallbacks([group for group in replicas if len(group) > 1]):
            pl.utilities.rank_zero_warn(line)

    def optimizer_nodes(self, count: int) -> OptimizerNodes:
        """Return the job's optimizer nodes, which are started at the first call. All ranks must call, with the same count."""
        if self._nodes is None:
            self._nodes = OptimizerNodes(count, self.connection, self.topology)
        return self._nodes

    @property
    def place_of_rank_0(self) -> tuple[int, int, int]:
        """Pipeline rank, data-parallel rank and tensor-parallel rank of global rank 0, which reads and writes files.

        If a launcher numbers the hosts at random, these can be any.
        """
        return self.placement.coordinate(0)

    @property
    def membership(self) -> checkpoint.Membership:
        """This rank's place in the job, as the checkpoint package takes it."""
        connection, groups, placement = self.connection, self.groups, self.placement
        return checkpoint.Membership(
            rank=connection.rank,
            size=connection.world_size,
            replica=groups.data_parallel_rank,
            num_replicas=placement.data_parallel_size,
            tensor_rank=groups.tensor_parallel_rank,
            tensor_size=placement.tensor_parallel_size,
            make_group=lambda name: groups.builder.build(range(connection.world_size), name, on_host=True),
        )

    def explaining(self, group: Any = None) -> AbstractContextManager[None]:
        """Inside, replace the error of a broken connection by its cause, or name ``group`` (None: all ranks) as the process group that was used, if
        nothing has named another."""
        return self.connection.explaining(functools.partial(self.groups.builder.describe, group))


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
        measures=measures_links,
        timeout_s=120.0 if timeout is None else min(120.0, timeout.total_seconds()),
    )


def _place(topology: Topology, asked: Asked, world_size: int) -> tuple[Placement, list[str]]:
    """Place the ranks, and note what was chosen, and why.

    Raises:
        ConfigurationError: the sizes do not fit.
    """
    notes, tensor_parallel_size = [], asked.tensor_parallel_size
    if asked.pipeline_parallel_size == "auto":
        size, reason = choose_pipeline_size(topology, tensor_parallel_size)
        hint = "" if size > 1 else "; for a pipeline give pipeline_parallel_size, or a topology with several clusters"
        notes.append(f"pipeline_parallel_size: {reason}{hint}")
    else:
        size = asked.pipeline_parallel_size
    placement = make_placement(
        topology, world_size=world_size, pipeline_parallel_size=size, tensor_parallel_size=tensor_parallel_size
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
    return placement, [*notes, *topology.warnings]


def _build_device_mesh(groups: ProcessGroups, placement: Placement) -> DeviceMesh:
    """Return the placement as a DeviceMesh, which uses these process groups; an axis of one rank gets a group of one. Every rank must call."""
    axes = (groups.pipeline, groups.data_parallel, groups.tensor_parallel)
    shape = (placement.pipeline_parallel_size, placement.data_parallel_size, placement.tensor_parallel_size)
    return DeviceMesh.from_group(
        [group or groups.builder.build_single() for group in axes],
        groups.builder.device.type,
        mesh=torch.tensor(placement.grid).view(shape),
        mesh_dim_names=("pipeline", "data_parallel", "tensor_parallel"),
    )
