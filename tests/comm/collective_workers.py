"""The code that the tests of collectives run in four processes, arranged as two clusters of two."""

import json
import os
import time
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lost_connections import raise_in

from lightning_holmes.comm.collective_timing import make_collectives, measure
from lightning_holmes.comm.collectives import Named, SyncGroups
from lightning_holmes.comm.mesh import GroupBuilder, build_process_groups
from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.errors import ConnectionLostError
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.sync_choice import SyncChoice
from lightning_holmes.torch_private import default_store

SIZE = 4
NUMEL = 24


def sync_groups() -> SyncGroups:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    builder = GroupBuilder(rank=rank, backend="gloo", device=torch.device("cpu"), timeout=timedelta(seconds=60))
    groups = build_process_groups(Placement((tuple(range(SIZE)),)), builder, pairs=[], clusters=["a", "b", "a", "b"])
    assert groups.gradients is not None
    return groups.gradients


def own(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def everything(_: Any) -> dict[str, Any]:
    """Run each collective on this rank's numbers, also with rounding; return the results and the time of
    measuring."""
    groups = sync_groups()
    rank = dist.get_rank()
    found: dict[str, Any] = {"crosses": groups.crosses, "sums": {}, "parts": {}, "gathered": {}, "rounded": {}}
    for name, collective in make_collectives(groups).items():
        summed, part, gathered = own(rank), own(rank), torch.zeros(NUMEL)
        collective.sum(summed)
        collective.scatter(part)
        gathered.view(SIZE, -1)[rank] = float(rank)
        collective.gather(gathered)
        found["sums"][name] = summed
        found["parts"][name] = part.view(SIZE, -1)[rank]
        found["gathered"][name] = gathered
    for name, collective in make_collectives(groups, torch.bfloat16).items():
        summed = own(rank)
        collective.sum(summed)
        found["rounded"][name] = summed
    queue = make_comm_queue(torch.device("cpu"))
    buffer = torch.zeros(2**20)
    began = time.perf_counter()
    measured = measure(make_collectives(groups), [buffer], groups.whole, queue, budget_s=0.3)
    found["measured"] = (dict(measured.seconds), measured.num_bytes, time.perf_counter() - began, float(buffer.sum()))
    shares = measure({"counted": Counted()}, [buffer], groups.whole, queue, shares=True, budget_s=0.3)
    found["shares"] = (dict(shares.seconds), Counted.calls)
    found["board"] = board(rank)
    found["lost"] = [lost(groups, group) for group in (groups.whole, groups.inside, groups.across)]
    queue.close()
    dist.barrier()
    return found


class Counted:
    """A collective that records its calls."""

    name = "counted"
    calls: ClassVar[set[str]] = set()

    def sum(self, tensor: torch.Tensor) -> None:
        self.calls.add("sum")

    def scatter(self, tensor: torch.Tensor) -> None:
        self.calls.add("scatter")

    def gather(self, tensor: torch.Tensor) -> None:
        self.calls.add("gather")


class Broken:
    """A collective whose connections break."""

    name = "broken"

    def sum(self, tensor: torch.Tensor) -> None:
        raise_in(dist, "Connection closed by peer [10.0.0.1]:4242")

    scatter = gather = sum


def lost(groups: SyncGroups, group: Any) -> str:
    with pytest.raises(ConnectionLostError) as raised:
        Named(Broken(), groups, group).gather(torch.zeros(1))
    return str(raised.value)


def board(rank: int) -> list[str]:
    made = SyncBoard(default_store(), run=1, groups=["0", "1"])
    choice = SyncChoice(
        stages=(rank,), ranks=(rank,), collective="p2p", seconds={"p2p": 0.5}, num_bytes=8, reason="", step=0
    )
    if rank in (1, 2):
        made.post(str(rank - 1), choice)
        made.post(str(rank - 1), choice)
    dist.barrier()
    if rank != 0:
        return []
    first = [json.dumps([c.stages, c.collective, dict(c.seconds)]) for c in made.read()]
    assert made.is_complete and made.read() == []
    return first
