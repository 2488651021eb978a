"""What is learnt of a module before it runs, and what is said of it."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.plan_options import LEFT_OPEN
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


def lesson_of(module: LightningModule, pipeline_parallel_size: int = 2) -> TraceResult:
    return trace_module(
        module,
        {"training_step": torch.randn(8, 4)},
        LEFT_OPEN,
        pipeline_parallel_size=pipeline_parallel_size,
        traces=True,
        world_size=1,
        device=torch.device("cpu"),
        splitter=BatchSplitter(),
        context=lambda step_name: nullcontext(),
    )


def test_a_value_that_changes_with_every_microbatch_is_told() -> None:
    with pytest.warns(UserWarning, match=r"Anneals.training_step changes count on the module.*num_microbatches=1 does"):
        traced = lesson_of(Anneals())
    assert traced.structure is not None and traced.structure.kept_values == ("count",)


def test_a_step_that_keeps_nothing_or_runs_whole_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lesson_of(Plain())
        lesson_of(Anneals(), pipeline_parallel_size=1)
