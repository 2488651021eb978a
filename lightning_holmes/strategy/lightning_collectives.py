"""ReplicaCollectives: the collectives of a Lightning strategy, for replicas of several ranks.

Within a replica all ranks have the same logged values, so that values are reduced and gathered over replicas, not over ranks. A hook of the
user may call them: tripwires.py then lets all ranks meet first.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.objects import broadcast_value
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import distributed_is_initialized, gather_over, reduce_over
from lightning_holmes.pipeline.whole_steps import describe_collective
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.run import Run


class ReplicaCollectives(pl.strategies.ParallelStrategy):
    """Base class of the strategy, with Lightning's collectives; all ranks must call each of them."""

    _connection: Connection | None
    _job: Job | None
    _run: Run | None

    def _lifted(self) -> AbstractContextManager[None]:
        """Context for operations that need all ranks and that a hook of the user may call: see tripwires.py."""
        return nullcontext() if self._run is None or not self._run.is_open else self._run.lifted()

    @contextmanager
    def _together(self, name: str) -> Iterator[None]:
        """Inside, all ranks take part in the collective ``name``.

        Raises:
            UnsupportedModuleError: a part of a step calls it, which the ranks do not run together.
        """
        if super().world_size > 1 and self._run is not None and self._run.is_inside_part:
            raise UnsupportedModuleError(describe_collective("a step", name))
        with self._lifted():
            yield

    @property
    def _replicas(self) -> Any:
        """The data-parallel process group of this rank, or None."""
        return None if self._job is None else self._job.groups.data_parallel

    def barrier(self, name: str | None = None) -> None:
        if self._connection is not None and self._connection.failed:
            return  # callbacks may still save; the other ranks do not call
        with self._together("barrier"):
            if distributed_is_initialized():
                dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: pl.strategies.strategy.TBroadcast, src: int = 0) -> pl.strategies.strategy.TBroadcast:
        with self._together("broadcast"):
            found: pl.strategies.strategy.TBroadcast = broadcast_value(obj, src)
            return found

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over ``group``, by default over the replicas: within a replica all ranks have the same values."""
        tensor, group = _copied(tensor), self._replicas if group is None else group
        with self._together("reduce"):
            if not isinstance(tensor, Tensor) or group is None or not distributed_is_initialized():
                return tensor
            if reduce_op in ("mean", "avg") and not (tensor.is_floating_point() or tensor.is_complex()):
                # Lightning's mean of integers is truncated to an integer, as for an odd number of samples over two replicas
                tensor = tensor.to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
            return reduce_over(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over ``group``; if it is None or WORLD (a LightningModule's default), over the replicas. The first dimension of the result
        counts the members."""
        tensor, group = _copied(tensor), self._replicas if group in (None, dist.group.WORLD) else group
        with self._together("all_gather"):
            if group is None and self._job is not None and super().world_size > 1:  # one replica
                return tensor.unsqueeze(0)
            return gather_over(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with self._together("reduce_boolean_decision"):
            if not distributed_is_initialized():
                return decision
            votes = torch.tensor(int(decision), device=self.root_device)
            dist.all_reduce(votes)
            return bool(votes == dist.get_world_size()) if all else bool(votes)


def _copied(value: Any) -> Any:
    """A tensor that a hook passes to a collective may be a parameter or a view of one, which is whole only until the ranks meet."""
    return value.clone() if isinstance(value, Tensor) else value
