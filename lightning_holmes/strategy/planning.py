"""The plan of a run that begins, from the module, its batches and the clusters.

    traced = learn_steps(trainer, context, TraceResult(), samples)       # every rank must call
    planned = plan_run(trainer, context, traced, samples[0])

A plan is chosen by runtime_plan.py and plan/, and carried out by run.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.collective_choice import notes_of
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.tables import print_plan
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.compat.replacements import Replacements
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.module_shards import ModuleShards
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.plan_request import PlanRequest, RuntimePlan
from lightning_holmes.strategy.runtime_plan import decide
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.snapshots import Snapshots
from lightning_holmes.strategy.tracing import TraceResult, trace_module


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run is made from, in addition to its trainer.

    Attributes:
        builder: builds the module, which may have no memory yet.
        loaded_state: the states that were loaded from a checkpoint.
        splitter: splits batches; it learns from the batches of all runs.
        former: the plan of the previous run, whose layout is kept if it fits.
        module_shards: the shards of a module that stays sharded between runs.
        snapshots: the snapshots of a fit; None if it takes none.
        undo: undoes the run's changes, last change first, even if its set-up fails half-way.
    """

    job: Job
    options: Options
    builder: ModuleBuilder
    loaded_state: LoadedState
    splitter: BatchSplitter
    former: RuntimePlan | None
    module_shards: ModuleShards
    undo: Replacements
    snapshots: Snapshots | None = None


def plan_run(
    trainer: "pl.Trainer",
    context: RunContext,
    traced: TraceResult,
    training: StepSample | None,
    *,
    why_not_sharded: str | None = None,
    shards_optimizer: Callable[[set[str], bool], tuple[bool, str]] | None = None,
) -> RuntimePlan:
    """Make the plan of a run of a traced module. Every rank must call.

    Args:
        traced: what tracing has found out about the module.
        training: a batch of the training step; None if nothing is trained.
        why_not_sharded: why the parameters cannot live in shards with ``sharding="auto"``; None if they can.
        shards_optimizer: see PlanRequest.

    Raises:
        HolmesError: the options are refused, on every rank alike.
    """
    job, options, module = context.job, context.options, trainer.lightning_module
    connection = job.connection
    clusters = [cluster.name for cluster, _ in job.topology.places()]
    fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
    notes = notes_of(options.gradient_sync, job.placement, clusters) if fitting else []
    options.check_given_plan(job.topology, world_size=connection.world_size, structure=traced.structure, module=module)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return decide(
        PlanRequest(
            module=module,
            sample=training,
            traced=traced,
            options=options.plan_options,
            training=options.training_options,
            layout=dataclasses.replace(job.layout, notes=(*job.layout.notes, *notes)),
            splitter=context.splitter,
            device=connection.device,
            rank=connection.rank,
            world_size=connection.world_size,
            context=functools.partial(step_context, trainer, "training_step"),
            stand_ins=context.builder.stand_ins,
            defers=context.builder.defers,
            former=context.former,
            predicts=bool(options.monitor) or any(isinstance(c, TimelineMonitor) for c in callbacks),
            why_not_sharded=why_not_sharded,
            shards_optimizer=shards_optimizer,
            gradient_sync=options.gradient_sync,
            topology_given=options.topology != "auto",
            measures=not torch.are_deterministic_algorithms_enabled(),
            resumed_microbatches=context.loaded_state.take_num_microbatches() if training is not None else None,
        )
    )


def learn_steps(
    trainer: "pl.Trainer",
    context: RunContext,
    known: TraceResult,
    samples: Sequence[StepSample],
) -> TraceResult:
    """Trace the steps of ``samples``, and return the results merged into ``known``. Every rank must call.

    Raises:
        HolmesError: the module or the options are refused, on every rank alike.
    """
    job = context.job
    connection, place = job.connection, job.place_of_rank_0[:2]
    traces = connection.rank == 0 or job.placement.coordinate(connection.rank)[:2] == place
    with context.builder.stand_ins() if traces else nullcontext():
        return trace_module(
            trainer.lightning_module,
            samples,
            context.options.plan_options,
            known=known,
            pipeline_parallel_size=job.placement.pipeline_parallel_size,
            traces=traces,
            device=connection.device,
            splitter=context.splitter,
            context=functools.partial(step_context, trainer),
        )


def step_context(trainer: "pl.Trainer", step_name: str) -> Any:
    """Return the context manager of the precision plugin under which a step runs."""
    plugin = trainer.precision_plugin
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[step_name]()


def show_plan(plan: Plan, pipeline: PipelineModule, job: Job) -> None:
    """Print the plan, with the number of parameters of each stage, on rank 0; not for one process with one stage."""
    if job.connection.rank != 0 or (job.connection.world_size == 1 and plan.num_stages == 1):
        return
    counts, structure = None, pipeline.structure
    if structure is not None:
        sizes = {n: p.numel() for n, p in pipeline.module.named_parameters()}
        counts = [
            sum(sizes[n] for n in structure.parameters_of(plan.partition, stage)) for stage in range(plan.num_stages)
        ]
    print_plan(plan, parameter_counts=counts)
