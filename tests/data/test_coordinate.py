"""The data-parallel coordinate: before, without and under the strategy, and data sets that shard themselves by it."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.data import data_parallel_coordinate
from lightning_holmes.errors import ConfigurationError

warnings.filterwarnings("ignore")
NUM_SAMPLES, BATCH = 32, 4


def samples() -> Tensor:
    return torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))


class Shards(IterableDataset[Any]):
    """Every n-th sample: by the data-parallel coordinate or, wrongly, by the rank."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Tensor]:
        if self.by == "rank":
            part, parts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            part, parts = data_parallel_coordinate(workers=True)
        yield from samples()[part::parts]


class Stack(TanhNet):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(*(8,) * 5)
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch)


def train(by: str, num_workers: int) -> Any:
    trainer = quiet_trainer(HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2), devices=4, max_epochs=1)
    module = Stack()
    trainer.fit(module, DataLoader(Shards(by), batch_size=BATCH, num_workers=num_workers))
    return torch.stack(module.seen), {n: p.detach().clone() for n, p in module.named_parameters()}


def run(payload: Any) -> Any:
    """Return the batches and the trained weights without and with workers, and the error for a data set that shards
    by the rank."""
    results = []
    for num_workers in (0, 2):
        results.append(train("coordinate", num_workers))
    after = os.environ.get("HOLMES_DATA_PARALLEL")
    try:
        train("rank", 0)
    except Exception as error:
        return results, after, f"{type(error).__name__}: {error}"
    return results, after, ""


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
    return launch(4, "test_coordinate:run", timeout_s=150)


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
        module.training_step(batch, 0).backward()
        optimizer.step()
    for results, after, _ in trained:
        assert after is None
        torch.testing.assert_close(results[num_workers // 2][1], dict(module.named_parameters()), rtol=1e-6, atol=1e-6)


@pytest.mark.xdist_group("coordinate")
def test_going_by_the_rank_is_refused_with_the_cure(trained):
    errors = [error for _, _, error in trained]
    assert all(errors), errors
    assert any("ConfigurationError" in e and "data_parallel_coordinate()" in e for e in errors), errors
