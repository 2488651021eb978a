"""Hooks that the strategy refuses."""

import contextlib
from pathlib import Path

import pytest
import torch
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import UnsupportedModuleError


class Hooked(TanhNet):
    def __init__(self, calls: list[int]) -> None:
        super().__init__(2, 2)
        self.layers[0][0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))


@pytest.mark.parametrize("parts", [1, 2])
def test_such_a_hook_is_called_once_a_batch_or_refused(parts: int, tmp_path: Path) -> None:
    trainer = quiet_trainer(
        HolmesStrategy(num_microbatches=parts), enable_model_summary=True, max_steps=1, default_root_dir=tmp_path
    )
    calls: list[int] = []
    refused = pytest.raises(
        UnsupportedModuleError, match=r"layers\.0\.0\.weight has a hook by register_post_accumulate"
    )
    with refused if parts > 1 else contextlib.nullcontext():
        trainer.fit(Hooked(calls), DataLoader(TensorDataset(torch.ones(4, 2)), 4))
    assert len(calls) == (1 if parts == 1 else 0)
