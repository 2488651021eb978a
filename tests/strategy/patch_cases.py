"""Runs that make the strategy patch as much of Lightning's and the user's objects as it ever does, and what is left after them."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from strategy_cases import Classifier, Setting, build, samples
from tanh_net import Unfreezes

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.strategy.compat.metrics import _AfterRun

LIBRARIES = ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "torchmetrics", "torch.nn", "torch.optim")


class Measured(Classifier):
    """Logs gradient norms and updates a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8)
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.accuracy.update(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


UnfreezeHead = partial(Unfreezes, "head")


class Raises(Callback):
    """Raises in the second batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ZeroDivisionError("as asked for")


class FailsInSetup(Measured):
    def configure_optimizers(self) -> Any:
        raise ZeroDivisionError("as asked for")


def fit(trainer: pl.Trainer, module: Any, loader: Any) -> None:
    trainer.fit(module, loader, loader)


def validate(trainer: pl.Trainer, module: Any, loader: Any) -> None:
    trainer.validate(module, loader, verbose=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the exception that it ends with, if any."""

    callbacks: Sequence[Callable[[], Callback]] = ()
    module: type[Measured] = Measured
    run: Callable[..., None] = fit
    error: type[Exception] | None = None
    words: str = ""
    holmes: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


CASES = {
    "validate": Case(run=validate),
    "fit": Case(callbacks=[UnfreezeHead, WeightAveraging, ModelSummary], holmes={"monitor": True}),
    "swa": Case(callbacks=[lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)]),
    "hook": Case(callbacks=[UnfreezeHead, Raises], error=ZeroDivisionError, words="as asked for"),
    "setup": Case(callbacks=[UnfreezeHead], module=FailsInSetup, error=ZeroDivisionError, words="as asked for"),
    "late_setup": Case(
        callbacks=[UnfreezeHead],
        words="adds parameters to the optimizer while the module trains",
        error=UnsupportedModuleError,  # raised after parameter groups and clipping have been patched
        holmes={"master_weights": True},
        trainer={"precision": "bf16-true"},
    ),
}


def libraries() -> dict[str, Any]:
    """Return the object at every name of the libraries' modules and of the classes that they define."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(LIBRARIES):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{inner}": part for inner, part in vars(value).items()})
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names that refer to another object now; numbers and strings, which Lightning itself changes, are left out."""
    return [
        key
        for key, value in before.items()
        if after.get(key) is not value and not isinstance(value, bool | int | float | str)
    ]


def parts(trainer: pl.Trainer, module: pl.LightningModule, loader: Any) -> dict[str, Any]:
    """Return by name the objects of the user and of Lightning that a run uses."""
    named: dict[str, Any] = {f"module {name}": part for name, part in module.named_modules()}
    named |= {f"callback {type(c).__name__}": c for c in trainer.callbacks}  # type: ignore[attr-defined]
    named |= {f"logger {type(logger).__name__}": logger for logger in trainer.loggers}
    named |= {"loader": loader, "plugin": trainer.precision_plugin, "epoch loop": trainer.fit_loop.epoch_loop}
    return named | {"signals": trainer._signal_connector, "checkpoints": trainer._checkpoint_connector}


def own(named: dict[str, Any]) -> dict[str, Any]:
    """Return the functions in the objects' own ``__dict__`` (of metrics, what they had), and how many hooks modules and parameters have."""
    found: dict[str, Any] = {}
    for name, part in named.items():
        for key, value in vars(part).items():
            value = value.own if isinstance(value, _AfterRun) else value
            if key in ("log", "log_dict"):
                continue  # Lightning sets these on callbacks itself
            if callable(value) and not isinstance(value, torch.nn.Module | pl.Trainer):
                found[f"{name}.{key}"] = value
            elif key.endswith("_hooks") and isinstance(value, dict):
                found[f"{name}.{key}"] = str(len(value))
            elif "holmes" in key:
                found[f"{name}.{key}"] = value
    return found


def leftovers(payload: dict[str, Any]) -> list[str]:
    """Return what a case has changed and not restored."""
    case = CASES[payload["case"]]
    plain = Setting(folder=Path(payload["folder"]))
    plain.trainer(max_epochs=1, callbacks=[WeightAveraging()]).fit(build(Measured), plain.loader(samples(16), 8))
    before = libraries()
    setting = Setting(folder=Path(payload["folder"]), holmes={**payload["holmes"], **case.holmes})
    trainer = setting.trainer(
        max_epochs=2,
        callbacks=[make() for make in case.callbacks] + [ModelCheckpoint(dirpath=payload["folder"])],
        enable_checkpointing=True,
        gradient_clip_val=1.0,
        **case.trainer,
    )
    module, loader = build(case.module), setting.loader(samples(32), 8)
    pl.seed_everything(7, workers=True, verbose=False)
    named, listed = parts(trainer, module, loader), list(trainer.callbacks)  # type: ignore[attr-defined]
    functions, group = own(named), module.accuracy.process_group
    with nullcontext() if case.error is None else pytest.raises(case.error, match=case.words):
        case.run(trainer, module, loader)
    found = differences(before, libraries())
    left = own(named)
    found += [key for key in functions.keys() | left.keys() if functions.get(key) != left.get(key)]
    if module.accuracy.process_group != group:
        found.append("process_group")
    if trainer.callbacks != listed:  # type: ignore[attr-defined]
        found.append(f"callbacks {trainer.callbacks}")  # type: ignore[attr-defined]
    if loader.worker_init_fn is not None:
        found.append("worker_init_fn")
    return found
