"""PlanningStrategy: what runs where in a run, from the module, its batches and the clusters.

Owns the plan and the prediction that it came from; how a plan is chosen is runtime_plan.py's and plan/'s business, what becomes
of it strategy.py's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl

from lightning_holmes.errors import HolmesError
from lightning_holmes.lightning_private import before_batch_transfer
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.report import print_plan
from lightning_holmes.plan.training import TrainingOptions
from lightning_holmes.strategy import admission
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.plan_request import PlanRequest, RuntimePlan
from lightning_holmes.strategy.runtime_plan import decide
from lightning_holmes.strategy.stepping import SteppingStrategy
from lightning_holmes.strategy.tracing import TraceResult, trace_module


class PlanningStrategy(SteppingStrategy):
    """Plans the run of a strategy that sets ``_builder``, ``_pipeline`` and the like."""

    _splitter: BatchSplitter
    _plan: Plan | None = None
    _runtime_plan: RuntimePlan | None = None
    _builder: ModuleBuilder | None = None
    _pipeline: PipelineModule | None = None

    @property
    def training_options(self) -> TrainingOptions:
        """The arguments that decide what a step sends and holds, as predictions take them."""
        return self._options.training_options

    @property
    def plan(self) -> Plan:
        """What runs where; known once the trainer has set the strategy up."""
        if self._plan is None:
            raise HolmesError("the plan is made when the trainer sets the strategy up; ask for it in a hook or later")
        return self._plan

    @property
    def prediction(self) -> Prediction | None:
        """What a training step was predicted to cost when the plan was made; None where no costs were known."""
        return None if self._runtime_plan is None else self._runtime_plan.prediction

    def _samples(self, trainer: "pl.Trainer") -> dict[str, Any]:
        """One batch of each loader that will be read, by the name of its step; on the device."""
        assert self.lightning_module is not None
        samples = {}
        for step_name, batch in admission.sample_batches(trainer, self.root_device).items():
            batch = self.precision_plugin.convert_input(batch)
            batch = before_batch_transfer(self.lightning_module, batch)
            samples[step_name] = self.batch_to_device(batch, dataloader_idx=0)
        return samples

    def _trace(self, samples: dict[str, Any]) -> TraceResult:
        """What these batches teach about the module."""
        assert self._placement is not None and self.lightning_module is not None
        place = self._placement.coordinate(0)[:2]
        traces = self.is_global_zero or self._placement.coordinate(self.global_rank)[:2] == place
        with self._builder.stand_ins() if self._builder and traces else nullcontext():
            return trace_module(
                self.lightning_module,
                samples,
                self._options.plan_options,
                pipeline_parallel_size=self._placement.pipeline_parallel_size,
                traces=traces,
                world_size=self.world_size,
                device=self.root_device,
                splitter=self._splitter,
                context=self._step_context,
            )

    def _decide(self, batch: Any, traced: TraceResult, *, predicts: bool, notes: Sequence[str]) -> RuntimePlan:
        """The plan of the run that begins."""
        assert self.lightning_module is not None and self._layout is not None and self._builder is not None
        return decide(
            PlanRequest(
                module=self.lightning_module,
                batch=batch,
                traced=traced,
                options=self._options.plan_options,
                training=self.training_options,
                layout=dataclasses.replace(self._layout, notes=(*self._layout.notes, *notes)),
                profile=self._options.profile,
                splitter=self._splitter,
                device=self.root_device,
                rank=self.global_rank,
                world_size=self.world_size,
                context=functools.partial(self._step_context, "training_step"),
                stand_ins=self._builder.stand_ins,
                former=self._runtime_plan,
                predicts=predicts,
                topology_given=self._options.topology != "auto",
            )
        )

    def _print_plan(self) -> None:
        assert self._pipeline is not None and self._plan is not None and self.lightning_module is not None
        if self.global_rank != 0 or self.world_size == 1:
            return
        counts = None
        structure = self._pipeline.structure
        if structure is not None:
            sizes = {n: p.numel() for n, p in self.lightning_module.named_parameters()}
            counts = [
                sum(sizes[n] for n in structure.parameters_of(self._plan.partition, stage))
                for stage in range(self._plan.num_stages)
            ]
        print_plan(self._plan, parameter_counts=counts)
