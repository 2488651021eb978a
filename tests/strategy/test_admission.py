"""Hooks that the strategy refuses."""

import contextlib
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.strategy.admission import check_module


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
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HolmesStrategy(num_microbatches=parts),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    calls: list[int] = []
    refused = pytest.raises(UnsupportedModuleError, match=r"layer\.weight has a hook by register_post_accumulate")
    with refused if parts > 1 else contextlib.nullcontext():
        trainer.fit(Hooked(calls), DataLoader(TensorDataset(torch.ones(4, 2)), 4, collate_fn=stacked))
    assert len(calls) == (1 if parts == 1 else 0)


def stacked(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


def test_a_hook_behind_each_accumulation_is_refused_in_a_pipeline() -> None:
    module = pl.LightningModule()
    module.layer = nn.Linear(2, 2)
    hook = module.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedModuleError, match="weight has a hook by register_post_accumulate"):
        check_module(module, fitting=True)
    check_module(module, fitting=True, is_pipeline=False)
    check_module(module, fitting=False)
    hook.remove()
    check_module(module, fitting=True)
