"""The collectives that Lightning and hooks ask a strategy for, where a rank is one of a replica's several.

Within a replica all ranks are given the same logged values, so what is reduced or gathered counts replicas.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _sync_ddp_if_available
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor

from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.errors import HolmesError


class ReplicaCollectives(ParallelStrategy):
    """Lightning's collectives over the groups of a pipeline; a base of HolmesStrategy."""

    _groups: ProcessGroups | None = None

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
        self._outside_steps("strategy.barrier")
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._outside_steps("strategy.broadcast")
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over ``group``, by default over the replicas: within one all ranks have the same values."""
        self._outside_steps("strategy.reduce")
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized():
            return tensor
        if group is None:
            group = None if self._groups is None else self._groups.data_parallel
            if group is None:
                return tensor
        if reduce_op in ("mean", "avg") and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning's mean of whole numbers is cut down to one: an odd number of samples over two replicas
            tensor = tensor.to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over ``group``, by default over the replicas; the first dimension counts them."""
        self._outside_steps("strategy.all_gather")
        if group is None and self._groups is not None:
            group = self._groups.data_parallel
            if group is None and self.world_size > 1:
                return tensor.unsqueeze(0)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._outside_steps("strategy.reduce_boolean_decision")
        if not _distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)
