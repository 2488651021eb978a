"""Job: the clusters, the placement of ranks and the process groups of this job, known before any module.

    job = Job(connection, options)               # every rank must call, once; later runs use it again
    job.placement.data_parallel_size, job.groups.pipeline
    with job.explaining(job.groups.data_parallel): ...

The layout is made by job_layout.py, the connection to other processes by connection.py.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes import checkpoint
from lightning_holmes.comm.mesh import release
from lightning_holmes.strategy import agreement
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.strategy.job_layout import build_device_mesh, find_topology, lay_out_job
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes
from lightning_holmes.strategy.options import Options


class Job:
    """The job that this process is part of. Its process groups live as long as the job, since metrics and checkpoints use them after a run.

    Attributes:
        layout: topology, placement, transports and process groups.
        device_mesh: the DeviceMesh with the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``; None for one process.

    Raises:
        ConfigurationError: the options do not fit the clusters, or ranks were given different options.
    """

    def __init__(self, connection: Connection, options: Options) -> None:
        self.connection = connection
        asked = options.asked
        # the layout of groups needs no link speeds, but choices by predicted cost do
        measures_links = asked.leaves_open and asked.pipeline_parallel_size != 1
        topology = find_topology(options.topology, connection, measures_links=measures_links)
        options.check_given_plan(topology, world_size=connection.world_size)
        chosen = {"topology": topology.to_yaml(), "process_group_backend": connection.backend}
        # compared before groups are built: that would hang if they differed
        facts = {f"HolmesStrategy({name}=)": repr(value) for name, value in (options.arguments() | chosen).items()}
        self.layout = lay_out_job(
            topology,
            asked,
            connection,
            facts=agreement.version_facts() | facts,
            sent_dtype=options.sent_dtype,
        )
        builder = self.layout.groups.builder
        connection.watch_cards(builder.fast_cards())
        weakref.finalize(self, release, self.layout.groups.builder.owned).atexit = False
        self.device_mesh: DeviceMesh | None = None
        if connection.world_size > 1:
            self.device_mesh = build_device_mesh(self.layout, connection.device.type)
        self.topology, self.placement, self.groups = topology, self.layout.placement, self.layout.groups
        self._nodes: OptimizerNodes | None = None

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
