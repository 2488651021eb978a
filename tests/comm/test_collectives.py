"""Each collective gives the sum, exactly or rounded."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from lost_connections import raise_in

from lightning_holmes.comm.collectives import Named, SyncGroups, make_collective
from lightning_holmes.comm.mesh import GroupBuilder, build_process_groups
from lightning_holmes.errors import ConfigurationError, ConnectionLostError
from lightning_holmes.plan.collective_choice import COLLECTIVE_NAMES, check_collective
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


pytestmark = pytest.mark.xdist_group("collectives")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of four processes."""
    return launch(SIZE, "test_collectives:everything", timeout_s=120)


@pytest.mark.parametrize("name", COLLECTIVE_NAMES)
def test_every_collective_gives_the_sum_to_all(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = torch.zeros(NUMEL)
    for rank in range(SIZE):
        expected += own(rank)
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["sums"][name], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(found["sums"][name], ranks[0]["sums"][name]), "replicas must not part ways"
        torch.testing.assert_close(found["parts"][name], expected.view(SIZE, -1)[rank], rtol=1e-6, atol=1e-6)
        assert found["gathered"][name].tolist() == [float(r) for r in range(SIZE) for _ in range(NUMEL // SIZE)]
        torch.testing.assert_close(found["rounded"][name], expected, rtol=4e-2, atol=4e-2)
        assert not torch.equal(found["rounded"][name], expected), "nothing was rounded"


def test_a_lost_connection_is_told_with_the_group_over_which_it_was(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        for text, part in zip(found["lost"], ("", "_inside_", "_across_"), strict=True):
            assert f"connection lost on rank {rank} while gradients were summed in the group holmes_gradients_" in text
            assert part in text and "(gloo" in text and "Connection closed by peer" in text


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match="'all_reduce', 'reduce_scatter', 'p2p', 'hierarchical'"):
        check_collective("ring")
