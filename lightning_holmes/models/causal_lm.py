"""CausalLM: the common part of GPT and HFCausalLM: the mean loss over tokens, its logging, and AdamW.

A subclass gives the logits and the labels of a batch. `microbatch_weight` returns the number of labels that count, so that
the weighted sum over microbatches and replicas is the exact mean over all labels, however ragged the batch.

Shapes: B samples, S positions, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_holmes.lightning_package import pl

IGNORE_INDEX = -100


class CausalLM(pl.LightningModule):
    """A language model that is trained on the mean cross entropy of its labels; -100 is ignored."""

    learning_rate: float
    min_learning_rate_ratio: float
    weight_decay: float
    warmup_steps: int
    betas: tuple[float, float]

    @abstractmethod
    def compute_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """The logits of a batch, (B, S, V)."""

    @abstractmethod
    def target_labels(self, batch: dict[str, Tensor]) -> Tensor:
        """The target token of each position of :meth:`scored_logits`; -100 where a position does not count."""

    def scored_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """The logits that have a label."""
        return self.compute_logits(batch)

    def microbatch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The number of labels over which this microbatch's loss is averaged."""
        return (self.target_labels(batch) != IGNORE_INDEX).sum()

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross entropy, in fp32, over the labels that count; 0 if none counts."""
        total = F.cross_entropy(
            self.scored_logits(batch).float().flatten(0, 1),
            self.target_labels(batch).flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        return total / self.microbatch_weight(batch).clamp(min=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation("val_loss", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation("test_loss", batch)

    def _log_evaluation(self, name: str, batch: dict[str, Tensor]) -> None:
        loss = self.compute_loss(batch)
        # weighted by the number of labels, so that the epoch's mean is the mean over all its labels
        num_labels = int(self.microbatch_weight(batch))
        self.log(name, loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True, batch_size=num_labels)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely next token at each position, (B, S)."""
        return self.compute_logits(batch).argmax(dim=-1)

    def configure_optimizers(self) -> pl.utilities.types.OptimizerLRScheduler:
        """AdamW in two groups, of which the one with fewer than two dimensions has no weight decay, with a linear warm-up and a cosine
        decay over ``trainer.estimated_stepping_batches`` steps."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        num_steps, ratio = self.trainer.estimated_stepping_batches, self.min_learning_rate_ratio
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, num_steps, self.warmup_steps, ratio)
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
