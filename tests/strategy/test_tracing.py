"""What is learned about a module before it runs, and the warnings and errors about it."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.plan_options import LEFT_OPEN
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult, trace_module


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()


class Anneals(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.count / 1000)


class Whitens(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch - batch.mean(0), batch_idx)


class Sequences(Plain):
    """Takes batches of shape (time, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.rnn(torch.stack([batch] * 3, 1))[0], batch_idx)

    validation_step = training_step


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed the weights: some random weights hide what a layer's inputs are."""
    torch.manual_seed(1)


def lesson_of(module: LightningModule, pipeline_parallel_size: int = 2, **asked: Any) -> TraceResult:
    steps = ["training_step", *(["validation_step"] if "eval_num_microbatches" in asked else [])]
    return trace_module(
        module,
        [StepSample(step_name=step, batch=torch.randn(8, 4), arguments=(0,)) for step in steps],
        replace(LEFT_OPEN, **asked),
        known=TraceResult(),
        pipeline_parallel_size=pipeline_parallel_size,
        traces=True,
        device=torch.device("cpu"),
        splitter=BatchSplitter(),
        context=lambda step_name: nullcontext(),
    )


def test_a_value_that_changes_with_every_microbatch_means_one_unless_a_number_is_given() -> None:
    words = r"leaves self.count on the module"
    traced = lesson_of(Anneals())
    assert traced.structure is not None and traced.structure.kept_values == ("count",)
    assert words in traced.dependence
    with pytest.warns(UserWarning, match=rf"training_step of Anneals {words}.*num_microbatches=1 leaves what"):
        assert lesson_of(Anneals(), num_microbatches=2).dependence == ""


def test_a_step_that_keeps_nothing_or_runs_whole_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lesson_of(Plain())
        lesson_of(Anneals(), pipeline_parallel_size=1)


def test_where_company_matters_the_number_of_microbatches_is_one_unless_one_is_given() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert "depends on which samples" in lesson_of(Whitens()).dependence
        assert "the first dimension is time to rnn" in lesson_of(Sequences()).dependence
        assert lesson_of(Plain()).dependence == "" == lesson_of(Whitens(), num_microbatches=1).dependence
    with pytest.warns(UserWarning, match="depends on which samples are together"):
        assert lesson_of(Whitens(), num_microbatches=2).dependence == ""
    with pytest.raises(
        UnsupportedModuleError, match=r"^num_microbatches=2: the first dimension .* is time to rnn: .*split_batch"
    ):
        lesson_of(Sequences(), num_microbatches=2)
    with pytest.raises(UnsupportedModuleError, match=r"^eval_num_microbatches=4: .* Sequences.validation_step"):
        lesson_of(Sequences(), eval_num_microbatches=4)
