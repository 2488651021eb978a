"""The data-parallel coordinate: before, without and under the strategy, and data sets that shard themselves by it."""

import pytest
import torch
from coordinate_workers import BATCH, NUM_SAMPLES, Stack, samples
from launch import launch

from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.data import data_parallel_coordinate
from lightning_holmes.errors import ConfigurationError


def test_one_process_is_one_replica(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert data_parallel_coordinate() == data_parallel_coordinate(workers=True) == (0, 1)


def test_too_early_is_an_error_and_published_wins(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match=r"8 processes.*__iter__"):
        data_parallel_coordinate()
    publish_coordinate((1, 4))
    assert data_parallel_coordinate() == (1, 4)
    publish_coordinate(None)
    with pytest.raises(ConfigurationError):
        data_parallel_coordinate()


@pytest.fixture(scope="module")
def trained():
    return launch(4, "coordinate_workers:run", timeout_s=150)


@pytest.mark.xdist_group("coordinate")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stages_agree_and_replicas_share_the_samples(trained, num_workers):
    """Two stages, two replicas. Baseline: a plain loop over both replicas' batches together; 1e-6."""
    batches = [results[num_workers // 2][0] for results, _, _ in trained]
    assert torch.equal(batches[0], batches[2]) and torch.equal(batches[1], batches[3])
    both = torch.cat((batches[0], batches[1]), dim=1)
    assert batches[0].shape == (NUM_SAMPLES // 2 // BATCH, BATCH, 8)
    assert sorted(map(tuple, both.flatten(0, 1).tolist())) == sorted(map(tuple, samples().tolist()))
    module = Stack()
    optimizer = module.configure_optimizers()
    for batch in both:
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    for results, after, _ in trained:
        assert after is None
        torch.testing.assert_close(results[num_workers // 2][1], dict(module.named_parameters()), rtol=1e-6, atol=1e-6)


@pytest.mark.xdist_group("coordinate")
def test_going_by_the_rank_is_refused_with_the_cure(trained):
    errors = [error for _, _, error in trained]
    assert all(errors), errors
    assert any("ConfigurationError" in e and "data_parallel_coordinate()" in e for e in errors), errors
