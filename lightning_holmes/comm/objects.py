"""Collectives of values of any kind, encoded by wire.py: unlike with torch's object collectives, nothing is unpickled.

all_gather_values({"rank": 1}, group)        # every rank of the group must call
broadcast_value(plan, 0)
any_of(found_one, group)
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.wire import decode, encode


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the value of each rank of ``group`` (None: all ranks), in group order; a single process gets its own
    value. All ranks of the group must call."""
    if _is_alone(group):
        return [value]
    device = _device(group)
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    parts = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(parts, padded.to(device), group=group)
    return [decode(part[:length].cpu().numpy().data) for part, length in zip(parts, lengths, strict=True)]


def broadcast_value(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast the value of global rank ``source`` in ``group`` (None: all ranks). That rank gets its own object back, as does a single process.
    All ranks of the group must call."""
    if _is_alone(group):
        return value
    device, gives = _device(group), dist.get_rank() == source
    data = torch.frombuffer(bytearray(encode(value) if gives else b"\0"), dtype=torch.uint8)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source, group=group)
    data = data.to(device) if gives else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return value if gives else decode(data.cpu().numpy().data)


def any_of(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is true on any rank of ``group`` (None: all). All of them must call."""
    if _is_alone(group):
        return flag
    found = torch.tensor([int(flag)], device=_device(group))
    wait_for(dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True), group)
    return bool(found)


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of the group's collectives lie."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
