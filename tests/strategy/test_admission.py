"""Hooks that the strategy refuses."""

import contextlib
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import UnsupportedModuleError


class Hooked(pl.LightningModule):
    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("parts", [1, 2])
def test_such_a_hook_is_called_once_a_batch_or_refused(parts: int, tmp_path: Path) -> None:
    trainer = quiet_trainer(
        HolmesStrategy(num_microbatches=parts), enable_model_summary=True, max_steps=1, default_root_dir=tmp_path
    )
    calls: list[int] = []
    refused = pytest.raises(UnsupportedModuleError, match=r"layer\.weight has a hook by register_post_accumulate")
    with refused if parts > 1 else contextlib.nullcontext():
        trainer.fit(Hooked(calls), DataLoader(TensorDataset(torch.ones(4, 2)), 4, collate_fn=stacked))
    assert len(calls) == (1 if parts == 1 else 0)


def stacked(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])
