"""PlanRequest and RuntimePlan: the input and the result of planning a run; plain records that runtime_plan.py and profiling.py share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.pipeline_plan import PipelinePlan
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.training import TrainingOptions
from lightning_holmes.strategy.job_layout import JobLayout
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    """The plan of a run, how it was chosen, and the prediction of a step, if costs are known."""

    plan: Plan
    choice: PipelinePlan | None
    num_layers: int

    @property
    def prediction(self) -> Prediction | None:
        """The predicted cost of a step; None if costs are not known."""
        return None if self.choice is None else self.choice.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of :func:`~lightning_holmes.strategy.runtime_plan.decide`.

    Attributes:
        sample: a batch of the training step; None if nothing is trained.
        stand_ins: returns a context in which a module that was built without memory has stand-in values, to be profiled.
        defers: whether the module was built without memory.
        context: returns the context manager of a training step (precision).
        former: the plan and choice of the strategy's previous run, whose layout is kept.
        predicts: whether a prediction is wanted even if the options leave nothing to choose.
        shards_optimizer: given the parameters that this rank will hold, and whether a step is predicted to be faster with a sharded
            optimizer: whether to shard it, and why; every rank must call it. None: there is none.
        gradient_sync: how gradients are summed over replicas, as asked.
        why_not_sharded: why parameters cannot live in shards with ``sharding="auto"``; None: they can.
        topology_given: whether the user has described the clusters and their links.
        measures: whether measurements may decide something.
        resumed_microbatches: the number of microbatches of a replica's batch with which a resumed run draws the same random numbers as before; None
            if no run is resumed, or if it is not known.
    """

    module: pl.LightningModule
    sample: StepSample | None
    traced: TraceResult
    options: PlanOptions
    training: TrainingOptions
    layout: JobLayout
    splitter: BatchSplitter
    device: torch.device
    rank: int
    world_size: int
    context: Callable[[], Any]
    stand_ins: Callable[[], AbstractContextManager[None]]
    defers: bool = False
    former: RuntimePlan | None = None
    predicts: bool = False
    why_not_sharded: str | None = None
    shards_optimizer: Callable[[set[str], bool], tuple[bool, str]] | None = None
    gradient_sync: str = "auto"
    topology_given: bool = False
    measures: bool = True
    resumed_microbatches: int | None = None
