"""The collectives of a Lightning strategy, for replicas of several ranks.

Within a replica all ranks have the same logged values, so that values are reduced and gathered over replicas, not over ranks.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.objects import broadcast_value
from lightning_holmes.lightning_private import distributed_is_initialized, gather_over, reduce_over

T = TypeVar("T")


def barrier(device: torch.device) -> None:
    """Wait for all ranks."""
    if not distributed_is_initialized():
        return
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast(value: T, src: int = 0) -> T:
    """Return ``value`` of global rank ``src``; all ranks must call."""
    found: T = broadcast_value(value, src)
    return found


def reduce(tensor: Tensor | Any, group: Any, reduce_op: Any) -> Tensor | Any:
    """Return ``tensor`` reduced over ``group``, or unchanged if ``group`` is None or ``tensor`` is no Tensor."""
    if not isinstance(tensor, Tensor) or group is None or not distributed_is_initialized():
        return tensor
    if reduce_op in ("mean", "avg") and not (tensor.is_floating_point() or tensor.is_complex()):
        # Lightning's mean of integers is truncated to an integer, as for an odd number of samples over two replicas
        tensor = tensor.to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
    return reduce_over(tensor, group, reduce_op=reduce_op)


def all_gather(tensor: Tensor, group: Any, *, alone: bool, sync_grads: bool) -> Tensor:
    """Return ``tensor`` of each member of ``group`` (None: all ranks), stacked in the first dimension. ``alone``: only this rank's."""
    if alone:
        return tensor.unsqueeze(0)
    return gather_over(tensor, group=group, sync_grads=sync_grads)


def decide(decision: bool, *, all: bool, device: torch.device) -> bool:
    """Return whether ``decision`` is True on all ranks (``all``), or on any; all ranks must call."""
    if not distributed_is_initialized():
        return decision
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes)
    return bool(votes == dist.get_world_size()) if all else bool(votes)
