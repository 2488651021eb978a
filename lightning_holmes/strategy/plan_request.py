"""What a run's plan is made from, and what comes of it: plain records that runtime_plan.py and profiling.py share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.pipeline_plan import PipelinePlan
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.training import TrainingOptions
from lightning_holmes.strategy.job_layout import JobLayout
from lightning_holmes.strategy.options import ProfileKind
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    """The plan of a run, how it was chosen, and the prediction of a step, where costs are known; and whether its parameters
    live in shards."""

    plan: Plan
    choice: PipelinePlan | None
    num_layers: int
    sharded_parameters: bool = False

    @property
    def prediction(self) -> Prediction | None:
        """What a step is predicted to cost."""
        return None if self.choice is None else self.choice.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What :func:`~lightning_holmes.strategy.runtime_plan.decide` works from.

    Attributes:
        sample: of the training step; None where nothing is trained.
        stand_ins: gives values to a module that was built without memory, while it is profiled.
        defers: it was built so.
        context: of a training step (precision).
        former: the plan and choice of the run before of this strategy, whose layout is kept.
        predicts: a prediction is wanted even where everything is settled.
        why_not_sharded: why parameters cannot live in shards where that is left to us; None: they can.
        topology_given: the user has described the clusters and their links.
        measures: what is measured may decide something.
        resumed_microbatches: of the run that is gone on from; None where there is none, or it does not say.
    """

    module: pl.LightningModule
    sample: StepSample | None
    traced: TraceResult
    options: PlanOptions
    training: TrainingOptions
    layout: JobLayout
    profile: ProfileKind
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
    topology_given: bool = False
    measures: bool = True
    resumed_microbatches: int | None = None
