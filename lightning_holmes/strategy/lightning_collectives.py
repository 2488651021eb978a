"""The collectives that Lightning and hooks ask a strategy for, where a rank is one of a replica's several.

Within a replica all ranks are given the same logged values, so what is reduced or gathered counts replicas.
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
    """What global rank ``src`` gives."""
    found: T = broadcast_value(value, src)
    return found


def reduce(tensor: Tensor | Any, group: Any, reduce_op: Any) -> Tensor | Any:
    """``tensor`` reduced over ``group``, or as it is where that is None."""
    if not isinstance(tensor, Tensor) or group is None or not distributed_is_initialized():
        return tensor
    if reduce_op in ("mean", "avg") and not (tensor.is_floating_point() or tensor.is_complex()):
        # Lightning's mean of whole numbers is cut down to one: an odd number of samples over two replicas
        tensor = tensor.to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
    return reduce_over(tensor, group, reduce_op=reduce_op)


def all_gather(tensor: Tensor, group: Any, *, alone: bool, sync_grads: bool) -> Tensor:
    """``tensor`` of each member of ``group`` (None: all ranks); the first dimension counts them. ``alone``: there are none."""
    if alone:
        return tensor.unsqueeze(0)
    return gather_over(tensor, group=group, sync_grads=sync_grads)


def decide(decision: bool, *, all: bool, device: torch.device) -> bool:
    """Whether every rank has decided for it, or any."""
    if not distributed_is_initialized():
        return decision
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes)
    return bool(votes == dist.get_world_size()) if all else bool(votes)
