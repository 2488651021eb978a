"""The optimizer and schedule of all models here: AdamW with a linear warm-up and a cosine decay.

def configure_optimizers(self):
    return build_adamw(self, learning_rate=3e-4, weight_decay=0.1, betas=(0.9, 0.95), warmup_steps=100)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler


def build_adamw(
    module: LightningModule,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    warmup_steps: int,
    min_learning_rate_ratio: float = 0.1,
) -> OptimizerLRScheduler:
    """Return AdamW over the trainable parameters, in two groups: weight decay applies only to those with two or more dimensions.

    The scheduler steps once per optimizer step; the length of the run is ``trainer.estimated_stepping_batches``.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
    num_steps = module.trainer.estimated_stepping_batches
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, num_steps, warmup_steps, min_learning_rate_ratio)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(step: int, num_steps: float, warmup_steps: int, min_ratio: float) -> float:
    """The learning rate at `step` of `num_steps` as a fraction of its peak; `num_steps` is infinite if the run has no known end."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(num_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, num_steps - warmup_steps))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
