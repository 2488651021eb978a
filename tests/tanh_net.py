"""Small LightningModules for fits that are compared with plain Lightning, and their data."""

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ByGradient(pl.LightningModule):
    """Its parameters go down the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TanhNet(ByGradient):
    """Layers of these widths; the loss is the mean square of their output. A batch is a tensor, or begins with one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        widths = itertools.pairwise(sizes or (4,) * 5)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in widths))

    def forward(self, batch: Any) -> Tensor:
        return self.layers(batch if isinstance(batch, Tensor) else batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def dealt(data: Dataset[Any], batch_size: int, trainer: pl.Trainer) -> DataLoader[Any]:
    """Return a loader of the samples in their order, of which each replica has its part: Lightning's own sampler would shuffle
    them. ``batch_size`` counts the samples of all replicas."""
    place: Any = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    sampler: Any = DistributedSampler(data, shuffle=False, **place)
    return DataLoader(data, batch_size // place["num_replicas"], sampler=sampler)


class KeepsLosses(TanhNet):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Unfreezes(BaseFinetuning):
    """Trains ``part`` of the module from the second epoch on."""

    def __init__(self, part: str = "layers") -> None:
        super().__init__()
        self.part = part

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(getattr(pl_module, self.part))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(getattr(pl_module, self.part), optimizer)
