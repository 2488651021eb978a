"""Training runs on data sets that shard themselves, for launch.py."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.data import data_parallel_coordinate

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


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
