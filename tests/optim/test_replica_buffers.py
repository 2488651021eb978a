"""Replicas take the buffers of one of them, in memory of any dtype."""

from typing import Any

import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor

from lightning_holmes.optim.replica_buffers import ReplicaBuffers


def made(rank: int) -> list[Tensor]:
    """Buffers of several dtypes and layouts, with other values on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(3, generator=generator).bfloat16(),
        torch.tensor(7 + rank),
        torch.randn(5, 4, generator=generator).t(),
        torch.tensor([True, rank == 0]),
        torch.randn(2, generator=generator, dtype=torch.float64),
        torch.empty(0),
    ]


def align(source: int) -> list[Any]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = made(rank)
    views = [buffer.data_ptr() for buffer in mine]
    group = dist.new_group(list(range(size)))
    buffers = ReplicaBuffers(group, group, source=source)
    assert buffers.has_others
    buffers.align(mine)
    assert views == [buffer.data_ptr() for buffer in mine], "the module's own tensors are filled"
    return [buffer.tolist() for buffer in mine]


def test_all_take_the_buffers_of_the_source() -> None:
    found = launch(3, "test_replica_buffers:align", 1)
    assert found == [[buffer.tolist() for buffer in made(1)]] * 3


def test_one_replica_has_no_others() -> None:
    assert not ReplicaBuffers(None, None, source=0).has_others
