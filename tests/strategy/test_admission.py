"""What the strategy takes a callback's hook to read, and hooks that it refuses."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.strategy.admission import _uses_its_arguments, check_module


class Clock(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        self.now = 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.now = 2


class Reader(Callback):
    def on_train_batch_start(self, *arguments: Any) -> None:
        self.seen = arguments[1].seen

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = [pl_module.seen for _ in range(2)]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_hook_that_never_looks_at_its_arguments_is_told_from_one_that_does(hook: str) -> None:
    assert not _uses_its_arguments(getattr(Clock(), hook))
    assert _uses_its_arguments(getattr(Reader(), hook))
    assert _uses_its_arguments(getattr(LambdaCallback(**{hook: lambda *arguments: print(arguments[1])}), hook))


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
