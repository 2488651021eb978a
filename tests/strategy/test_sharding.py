"""What the strategy accepts with a sharded optimizer, what it refuses by name, and which hooks may read gradients."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
)
from torch import nn

from lightning_holmes.optim.elementwise import find_separability
from lightning_holmes.strategy.sharding import gradient_readers, refusal_of


def refused(optimizer: torch.optim.Optimizer, *callbacks: pl.Callback, module: nn.Module | None = None) -> str:
    found = find_separability(optimizer, torch.device("cpu"))
    trainer: Any = SimpleNamespace(callbacks=list(callbacks), lightning_module=module or nn.Module())
    return refusal_of(found, optimizer, trainer)


def test_what_cannot_be_divided_is_named() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    assert refused(torch.optim.AdamW(weights)) == ""
    assert "LBFGS" in refused(torch.optim.LBFGS(weights))
    assert "ModelPruning" in refused(torch.optim.AdamW(weights), ModelPruning("l1_unstructured"))
    assert "BackboneFinetuning" in refused(torch.optim.AdamW(weights), BackboneFinetuning())
    assert refused(torch.optim.SGD([nn.Parameter(torch.ones(3, dtype=torch.complex64))], 0.1)) != ""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert refused(torch.optim.AdamW(module.parameters()), module=module) == ""
    module[1].weight.data = module[0].weight.data.t()
    assert "0.weight and 1.weight lie in the same memory" in refused(
        torch.optim.AdamW(module.parameters()), module=module
    )


class Watches(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Clipping(pl.LightningModule):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        pass


def test_hooks_between_backward_and_step_may_read_gradients() -> None:
    def found(module: pl.LightningModule, *callbacks: pl.Callback) -> list[str]:
        trainer: Any = SimpleNamespace(lightning_module=module, callbacks=list(callbacks))
        return gradient_readers(trainer)

    late = LambdaCallback(on_train_batch_end=lambda *_: None)
    assert found(pl.LightningModule(), late, LearningRateMonitor(), GradientAccumulationScheduler({0: 2})) == []
    told = LambdaCallback(on_after_backward=lambda *_: None)
    assert found(Clipping(), Watches(), told) == [
        "Clipping.configure_gradient_clipping",
        "Watches.on_after_backward",
        "LambdaCallback.on_after_backward",
    ]
