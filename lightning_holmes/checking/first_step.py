"""Prepare a module for its first step without a Trainer run: call, on a copy, the hooks that run before it.

    with at_first_step(module, batch, ["training_step"]) as first:
        first.modules["training_step"].training_step(batch, 0)      # has what setup() and on_fit_start() make
        first.notes                                                 # hooks that failed outside of a run

The trainer is a stand-in: it has optimizers, a logger that records nothing, and no data.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.shadow import replace_parameters, shadow_copy

_BEFORE_RUN = ("setup", "configure_model", "configure_optimizers", "on_fit_start")
_BEFORE_STEP = {
    "training_step": ("on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    "validation_step": ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    "test_step": ("on_test_start", "on_test_epoch_start", "on_test_batch_start"),
    "predict_step": ("on_predict_start", "on_predict_epoch_start", "on_predict_batch_start"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """The module as it is before each step first runs, by step name, and messages about hooks that failed."""

    modules: Mapping[str, pl.LightningModule]
    notes: Sequence[str]


@contextmanager
def at_first_step(module: pl.LightningModule, batch: Any, steps: Sequence[str]) -> Iterator[FirstSteps]:
    """Context with copies of ``module`` prepared for their first steps; a module that has a trainer, or overrides no
    such hook, is used itself."""
    hooks = [*_BEFORE_RUN, *(hook for step in steps for hook in _BEFORE_STEP[step])]
    own = [hook for hook in hooks if pl.utilities.model_helpers.is_overridden(hook, module)]
    has_trainer = trainer_of(module) is not None
    with attached(module):
        if has_trainer or not own:
            yield FirstSteps(modules=dict.fromkeys(steps, module), notes=())
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with preserved_random_state(device):
            first = _prepare(module, batch, steps, own)
        yield first


def _prepare(module: pl.LightningModule, batch: Any, steps: Sequence[str], hooks: Sequence[str]) -> FirstSteps:
    trainer = trainer_of(module)
    trainer.state.fn, trainer.training = pl.trainer.states.TrainerFn.FITTING, True
    notes: list[str] = []

    def call(owner: pl.LightningModule, hook: str, *arguments: Any, **named: Any) -> None:
        vars(owner)["log"] = vars(owner)["log_dict"] = lambda *_, **__: None
        try:
            if hook == "configure_optimizers":
                trainer.strategy.setup_optimizers(trainer)
            else:
                getattr(owner, hook)(*arguments, **named)
        except Exception as error:
            notes.append(f"{hook} does not run without a run ({type(error).__name__}: {error}), and is left out")
        finally:
            del vars(owner)["log"], vars(owner)["log_dict"]

    built = _copy(module, trainer)
    # hooks may change weights: the copy has its own
    replace_parameters(built, lambda p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
    for hook in hooks:
        if hook in _BEFORE_RUN:
            call(built, hook, **({"stage": "fit"} if hook == "setup" else {}))
    modules = {}
    for step in steps:
        modules[step] = _copy(built, trainer)
        for hook in _BEFORE_STEP[step]:
            if hook in hooks:
                call(modules[step], hook, *((batch, 0) if hook.endswith("batch_start") else ()))
    return FirstSteps(modules=modules, notes=tuple(dict.fromkeys(notes)))


def _copy(module: pl.LightningModule, trainer: pl.Trainer) -> pl.LightningModule:
    copy = shadow_copy(module)
    set_trainer(copy, trainer)
    trainer.strategy.connect(copy)
    return copy


@contextmanager
def attached(module: pl.LightningModule) -> Iterator[None]:
    """Attach a trainer that does nothing to a module without one, for steps that read ``self.trainer``."""
    if trainer_of(module) is not None:
        yield
        return
    chatter = logging.getLogger(pl.__name__)
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about GPUs that this trainer does not use
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                logger=pl.loggers.logger.DummyLogger(),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    finally:
        chatter.setLevel(level)
    set_trainer(module, trainer)
    try:
        yield
    finally:
        set_trainer(module, None)
