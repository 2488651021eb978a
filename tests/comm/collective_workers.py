"""The code that the tests of collectives run in four processes, arranged as two clusters of two."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_connections import raise_in

from lightning_holmes.comm.collectives import Named, SyncGroups, make_collective
from lightning_holmes.comm.mesh import GroupBuilder, build_process_groups
from lightning_holmes.errors import ConnectionLostError
from lightning_holmes.plan.collective_choice import COLLECTIVE_NAMES
from lightning_holmes.plan.placement import Placement

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
    """Run each collective on this rank's numbers, also with rounding; return the results."""
    groups = sync_groups()
    rank = dist.get_rank()
    found: dict[str, Any] = {"sums": {}, "parts": {}, "gathered": {}, "rounded": {}}
    for name in COLLECTIVE_NAMES:
        collective = make_collective(name, groups)
        summed, part, gathered = own(rank), own(rank), torch.zeros(NUMEL)
        collective.sum(summed)
        collective.scatter(part)
        gathered.view(SIZE, -1)[rank] = float(rank)
        collective.gather(gathered)
        found["sums"][name] = summed
        found["parts"][name] = part.view(SIZE, -1)[rank]
        found["gathered"][name] = gathered
    for name in COLLECTIVE_NAMES:
        summed = own(rank)
        make_collective(name, groups, torch.bfloat16).sum(summed)
        found["rounded"][name] = summed
    found["lost"] = [lost(groups, group) for group in (groups.whole, groups.inside, groups.across)]
    dist.barrier()
    return found


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
