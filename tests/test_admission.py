"""What the strategy takes a callback's hook to read."""

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from lightning_holmes.admission import _uses_its_arguments


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
