"""State that replicas change with their own samples: running means, a codebook. Baseline: Lightning's DDP with the same shares of
the batches. Tolerance: 1e-5 relative."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from launch import launch
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.pipeline.noticed_functions import COUNTING, NoticedFunctions


class Codes(ByGradient):
    """Batch normalisation in each layer, a codebook that follows the samples and is a target of the next steps, and buffers
    of other dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))
        for name, kind in (
            ("narrow", torch.bfloat16),
            ("counts", torch.int64),
            ("flags", torch.bool),
            ("none", torch.half),
        ):
            self.register_buffer(name, torch.zeros(0 if name == "none" else 4, 2, dtype=kind).t())
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for buffer in (self.narrow, self.counts, self.flags):
            buffer.copy_(4 * batch[0][:2] > 1 if buffer.dtype == torch.bool else 4 * batch[0][:2])
        out = self.head(self.layers(batch[0]))
        nearest = torch.cdist(out.detach(), self.codes).argmin(1)
        loss = (out - self.codes[nearest]).square().mean() + (out - batch[0]).square().mean()
        means = torch.stack(
            [torch.where((nearest == k)[:, None], out.detach(), self.codes[k]).mean(0) for k in range(3)]
        )
        self.codes.mul_(0.9).add_(0.1 * means)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.head(self.layers(batch[0]))
        self.log("val", torch.cdist(out, self.codes).min(1).values.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))


def fit(payload: dict[str, Any]) -> list[Any]:
    """For 1 and 2 batches a step: what the hooks saw and the module's state."""
    found = []
    for accumulated in (1, 2):
        pl.seed_everything(3, verbose=False)
        module, data = Codes(), TensorDataset(torch.randn(32, 4))
        strategy = "ddp" if payload["holmes"] is None else HolmesStrategy(**payload["holmes"])
        trainer = quiet_trainer(
            strategy, devices=payload["size"], max_epochs=2, val_check_interval=2, accumulate_grad_batches=accumulated
        )
        loader = DataLoader(data, batch_size=4)
        trainer.fit(module, loader, loader)
        if trainer.global_rank == 0:
            found.append({"seen": module.seen} | dict(module.state_dict()))
    return found


@pytest.mark.parametrize(
    ("size", "holmes"),
    [
        (2, {"pipeline_parallel_size": 1}),
        (2, {"sharding": "parameters"}),
        (4, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
    ],
)
def test_replicas_take_the_buffers_of_rank_0(size: int, holmes: dict[str, Any]) -> None:
    plain = launch(2, "test_replicas_as_ddp:fit", {"size": 2, "holmes": None})[0]
    staged = launch(size, "test_replicas_as_ddp:fit", {"size": size, "holmes": holmes})[0]
    for expected, found in zip(plain, staged, strict=True):
        assert len(expected["seen"]) > 12
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_collectives_that_a_file_has_imported_by_name_are_seen() -> None:
    noticed: list[str] = []
    with NoticedFunctions(dist, COUNTING).noticing(noticed.append):
        for collective in (dist.all_reduce, all_reduce):
            with pytest.raises(ValueError, match="process group"):
                collective(torch.ones(()))
    with pytest.raises(ValueError, match="process group"):
        all_reduce(torch.ones(()))
    assert noticed == ["all_reduce", "all_reduce"]
