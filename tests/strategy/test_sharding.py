"""What the strategy accepts of a sharded optimizer, whom it refuses by name, and which hooks may read gradients."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.elementwise import test_separability as find_separability
from lightning_holmes.strategy.sharding import gradient_readers, refusal_of


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sharded_optimizer": "yes"}, "sharded_optimizer='yes'"),
        ({"master_weights": 1}, "master_weights=1"),
        ({"sharded_optimizer": False, "master_weights": True}, "sharded_optimizer is False"),
    ],
)
def test_impossible_arguments_name_the_argument(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HolmesStrategy(**arguments)


def refused(optimizer: torch.optim.Optimizer, *callbacks: pl.Callback) -> str:
    found = find_separability(optimizer, torch.device("cpu"))
    return refusal_of(found, optimizer, SimpleNamespace(callbacks=list(callbacks)))  # type: ignore[arg-type]


def test_what_cannot_be_divided_is_named() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    assert refused(torch.optim.AdamW(weights)) == ""
    assert "LBFGS" in refused(torch.optim.LBFGS(weights))
    assert "BackboneFinetuning" in refused(torch.optim.AdamW(weights), BackboneFinetuning())
    assert refused(torch.optim.SGD([nn.Parameter(torch.ones(3, dtype=torch.complex64))], 0.1)) != ""


class Clock(pl.Callback):
    """Reads nothing that holds gradients."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = (trainer.global_step, float(outputs["loss"]))
        pl_module.log("time", 1.0)


class Ticks(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        self.started = True


class Norms(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.largest = max(p.grad.norm() for p in pl_module.parameters())


class Hidden(pl.Callback):
    """Hands the module to code that cannot be looked into."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.look(pl_module)

    def look(self, module: Any) -> None:
        pass


class Kept(pl.Callback):
    """Has kept parameters, and needs no argument to read their gradients."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.watched = {"all": list(pl_module.parameters())}

    def on_train_batch_end(self, *_: Any) -> None:
        self.sizes = [None if getattr(p, "g" + "rad") is None else 1 for p in self.watched["all"]]


def tell_gradients(trainer: Any, pl_module: Any) -> None:
    print(MODULE.weight.grad)


MODULE = nn.Linear(1, 1)


class Module(pl.LightningModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("loss_scale", 1.0)


class Clipping(pl.LightningModule):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-1, 1)


def test_hooks_that_may_reach_gradients() -> None:
    def found(module: pl.LightningModule, *callbacks: pl.Callback) -> list[str]:
        trainer: Any = SimpleNamespace(lightning_module=module, callbacks=list(callbacks))
        return [name for name, _ in gradient_readers(trainer)]

    assert found(pl.LightningModule(), Clock(), Ticks(), pl.callbacks.LearningRateMonitor()) == []
    assert found(Module(), Norms(), Hidden()) == ["Norms.on_before_optimizer_step", "Hidden.on_after_backward"]
    assert found(Clipping()) == ["Clipping.configure_gradient_clipping"]
    kept = Kept()
    assert found(pl.LightningModule(), kept) == []
    kept.setup(None, nn.Linear(2, 2), "fit")
    assert found(pl.LightningModule(), kept) == ["Kept.on_train_batch_end"]
    told = pl.callbacks.LambdaCallback(on_after_backward=tell_gradients)
    assert found(pl.LightningModule(), told) == ["LambdaCallback.on_after_backward"], "of a module that is no argument"
    asked = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: module.zero_grad())
    assert found(pl.LightningModule(), asked) == ["LambdaCallback.on_train_batch_end"]
