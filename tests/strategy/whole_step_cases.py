"""Steps that ask for what only a whole step may have: a collective, the log folder, a metric's value, a skipped batch."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.mean = torchmetrics.MeanMetric()

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = batch[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class ReadsLogDir(Stack):
    """Logs the length of the log folder's name that each step reads."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("seen", float(len(str(self.trainer.log_dir))))
        return loss


class KeepsLogDir(Stack):
    def setup(self, stage: str) -> None:
        self.folder = self.trainer.log_dir

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("seen", float(len(str(self.folder))))
        return loss


class Computes(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean.compute(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.log("val", self.mean.compute())


class LogsMetric(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Gathers(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        every = self.all_gather(batch[0].mean() * loss, sync_grads=True)
        self.log("gathered", every.detach().sum())
        return loss + every.square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("at the end", float(self.all_gather(torch.tensor(1.0)).sum()))


class Skips(Stack):
    """Skips the second batch of an accumulation window, a whole window, and one batch before the last."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx in (1, 4, 5, 6) else loss


class SkipsOneMicrobatch(Stack):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch[0].sum() < 0 else loss


MODULES = {c.__name__: c for c in (ReadsLogDir, KeepsLogDir, Computes, LogsMetric, Gathers, Skips, SkipsOneMicrobatch)}


def run(name: str, strategy: Any, folder: Path, *, logger: bool = False, **options: Any) -> Any:
    """Return the final parameters and the logged values, or the error."""
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = torch.randn(32, 4)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = quiet_trainer(
        strategy if isinstance(strategy, str) else HolmesStrategy(**strategy, timeout=timedelta(seconds=60)),
        devices=devices,
        max_epochs=1,
        logger=CSVLogger(folder) if logger else False,
        default_root_dir=folder,
        **options,
    )
    data = DataLoader(TensorDataset(inputs), batch_size=4)
    try:
        trainer.fit(module, data, data if "validation_step" in vars(type(module)) else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value.detach().clone() for key, value in module.state_dict().items()}, logged


def on_each_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """Return each run of the payload, by its name."""
    folder = Path(payload["folder"])
    return {key: run(name, strategy, folder, **more) for key, (name, strategy, more) in payload["runs"].items()}
