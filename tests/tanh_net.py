"""Small LightningModules of four layers, for fits that are compared with plain Lightning."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class TanhNet(pl.LightningModule):
    """Four layers; the loss is the mean square of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeepsLosses(TanhNet):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
