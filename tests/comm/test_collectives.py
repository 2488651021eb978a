"""Each collective gives the sum, exactly or rounded."""

from typing import Any

import pytest
import torch
from collective_workers import NUMEL, SIZE, everything, own
from launch import launch

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_choice import COLLECTIVE_NAMES, check_collective

pytestmark = pytest.mark.xdist_group("collectives")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of four processes."""
    assert everything.__module__ == "collective_workers"
    return launch(SIZE, "collective_workers:everything", timeout_s=120)


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
