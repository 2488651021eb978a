"""How a process joins its job: ranks, connection, topology, groups; and what broke, when a connection breaks.

A base of HolmesStrategy; what it holds is connection.py's and job.py's.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.errors import HolmesError
from lightning_holmes.lightning_private import set_device_mesh
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.strategy import collectives
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.job_layout import JobLayout
from lightning_holmes.strategy.launcher import HolmesLauncher
from lightning_holmes.strategy.options import Options


class JoiningStrategy(ParallelStrategy):
    """The processes of a strategy, from the launcher to process groups."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._job: Job | None = None

    @property
    def _layout(self) -> JobLayout | None:
        return None if self._job is None else self._job.layout

    @property
    def _placement(self) -> Placement | None:
        return None if self._job is None else self._job.placement

    @property
    def _groups(self) -> ProcessGroups | None:
        return None if self._job is None else self._job.groups

    @property
    def _failed(self) -> bool:
        return self._connection is not None and self._connection.failed

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall inject distributed samplers and reduce logged values: where there are replicas.

        A pipeline alone reads its data and logs as one process does.
        """
        return self.data_parallel_size > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Hosts of the job, as given to the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of tensors' groups; None until chosen."""
        return self._options.process_group_backend if self._connection is None else self._connection.backend

    @property
    def data_parallel_rank(self) -> int:
        """This rank's coordinate among the replicas: what decides which samples it loads."""
        return 0 if self._job is None else self._job.groups.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return 1 if self._job is None else self._job.placement.data_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = HolmesLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._agree_on_checkpoint
        )

    def _agree_on_checkpoint(self, find: Callable[[], Any]) -> Any:
        """What ``find()`` returns on rank 0, or raises there, on every rank; before the run is set up."""
        self.setup_environment()
        if self.world_size == 1:
            return find()
        path, error = None, None
        if self.is_global_zero:
            try:
                path = find()
            except Exception as exception:
                error = exception
        with self._explaining():
            path, error = self.broadcast((path, error))
        if error is not None:
            raise error
        return path

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank, as Lightning's strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # joining

    def setup_environment(self) -> None:
        # no reset_seed() as in DDP: random numbers go on as in plain Lightning, and share_random_state aligns stages
        # Remains of an earlier run: a forked data worker that collects its groups waits for threads that it has not.
        gc.collect()
        super().setup_environment()
        self.set_world_ranks()
        if self._connection is None:
            assert self.cluster_environment is not None
            self._connection = Connection(
                self.cluster_environment, self.root_device, num_nodes=self.num_nodes, options=self._options
            )
        self._connection.open()
        with self._explaining():
            if self._job is None:
                self._job = Job(self._connection, self._options)
        if self.lightning_module is not None:
            set_device_mesh(self.lightning_module, self._job.device_mesh)
        publish_coordinate((self.data_parallel_rank, self.data_parallel_size))

    @property
    def plan_options(self) -> PlanOptions:
        """What the arguments, or a plan file, ask for of what a plan decides."""
        return self._options.plan_options

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks by the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``; a LightningModule reads it as
        ``self.device_mesh``.

        Known from ``configure_model`` on, where there is more than one process.
        """
        if self._job is None or self._job.device_mesh is None:
            raise HolmesError("the device mesh is made when the trainer sets up several processes; ask for it later")
        return self._job.device_mesh

    # collectives

    @property
    def inside_step(self) -> bool:
        """Whether a step of the user's runs at this moment on this rank."""
        return False

    def _outside_steps(self, what: str) -> None:
        if self.inside_step:
            raise HolmesError(
                f"{what} inside a step: the stages of a pipeline run different parts of it, so a collective would hang; "
                f"call it in a hook at the end of a batch or an epoch"
            )

    def barrier(self, name: str | None = None) -> None:
        if not self._failed:  # callbacks may still save, but the other ranks do not come any more
            self._outside_steps("strategy.barrier")
            collectives.barrier(self.root_device)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._outside_steps("strategy.broadcast")
        return collectives.broadcast(obj, src)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over ``group``, by default over the replicas: within one all ranks have the same values."""
        self._outside_steps("strategy.reduce")
        return collectives.reduce(tensor, self._replicas if group is None else group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over ``group``, by default over the replicas; the first dimension counts them."""
        self._outside_steps("strategy.all_gather")
        group = self._replicas if group is None else group
        alone = group is None and self._job is not None and self.world_size > 1
        return collectives.all_gather(tensor, group, alone=alone, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._outside_steps("strategy.reduce_boolean_decision")
        return collectives.decide(decision, all=all, device=self.root_device)

    # failures

    def _explaining(self, group: Any = None) -> AbstractContextManager[None]:
        if self._job is not None:
            return self._job.explaining(group)
        return nullcontext() if self._connection is None else self._connection.explaining()

    @property
    def _replicas(self) -> Any:
        """The group of this rank's replicas, or None."""
        return None if self._job is None else self._job.groups.data_parallel
