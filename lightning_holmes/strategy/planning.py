"""The plan of a run that begins: all ranks find what is known, and rank 0 chooses the plan (plan/planner.py).

    plan = plan_run(trainer, context, traced, samples[0])       # every rank must call

Costs come from profiling.py. Links have the speeds that were measured on this topology before (``lightning-holmes
topology``) or at the start, or stated speeds. If there are no costs, the plan is made without them, and says why. run.py carries it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.lightning_package import pl
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.collective_choice import notes_of
from lightning_holmes.plan.groups import plan_groups
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.planner import Known, choose, complete, settle
from lightning_holmes.plan.rounding import rounded_links
from lightning_holmes.plan.tables import print_plan
from lightning_holmes.strategy import sharding
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.profiling import Costs, find_costs, make_cost_model
from lightning_holmes.strategy.run_context import RunContext
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult
from lightning_holmes.torch_private import is_compiled


def plan_run(
    trainer: pl.Trainer,
    context: RunContext,
    traced: TraceResult,
    training: StepSample | None,
    *,
    separability: Separability | None = None,
    may_shard_parameters: bool = False,
) -> Plan:
    """Make the plan of a run of a traced module. Every rank must call.

    Args:
        traced: what tracing has found out about the module.
        training: a batch of the training step; None if nothing is trained.
        separability: how the optimizer of a fit can be sharded; None if it was not tested.
        may_shard_parameters: see sharding.may_shard_parameters.

    Raises:
        HolmesError: the options are refused, on every rank alike.
    """
    job, options, module, structure = context.job, context.options, trainer.lightning_module, traced.structure
    connection = job.connection
    options.check_given_plan(job.topology, world_size=connection.world_size, structure=structure)
    resumed = context.loaded_state.take("num_microbatches") if training is not None else None
    known, asked = settle(
        Known(
            topology=job.topology,
            placement=job.placement,
            layers=None if structure is None else structure.layers,
            num_layers=0 if structure is None else structure.num_layers,
            batch_size=traced.batch_size,
            not_interleaved=None if structure is None else _not_interleaved(options.topology != "auto", job, structure),
            not_layered=_not_layered(traced),
            may_split=not any(map(is_compiled, module.modules())),
            why_not_sharded=sharding.why_not_sharded(
                trainer, options, separability, structure, may_shard=may_shard_parameters
            ),
            num_microbatches=_exact_microbatches(traced, resumed),
            notes=(*job.notes, *_notes_of_sync(trainer, job, options.asked)),
        ),
        options.asked,
    )
    known = replace(known, former=_kept(context.former, known, asked))
    costs = None
    if structure is not None and known.former is None and _needs_costs(trainer, options.monitor, known, asked):
        costs = find_costs(trainer, context, traced, training)
    plan: Plan = connection.ask_rank_0(lambda: _choose(known, asked, structure, costs, context))
    found = separability if training else None
    sharded, why = sharding.choose_sharding(trainer, context, plan, structure, found)
    plan = complete(
        plan,
        topology=rounded_links(job.topology),
        sharding=sharded,
        sockets=job.is_gloo,
        by_links=job.num_hosts > 1 and not torch.are_deterministic_algorithms_enabled(),
        groups=plan_groups(job.placement, job.pairs, job.transports.describe, job.clusters),
        asked=asked,
        notes=why,
    )
    if structure is not None:
        structure.check_partition(plan.partition, one_rank=plan.pipeline_parallel_size == 1)
    return plan


def _notes_of_sync(trainer: pl.Trainer, job: Job, asked: Asked) -> list[str]:
    fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
    return notes_of(asked.gradient_sync, job.placement, job.clusters) if fitting else []


def _needs_costs(trainer: pl.Trainer, monitor: bool | int, known: Known, asked: Asked) -> bool:
    """Whether something is left to decide by costs, or a prediction is wanted."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    predicts = bool(monitor) or any(isinstance(c, TimelineMonitor) for c in callbacks)
    staged = known.placement.pipeline_parallel_size > 1 and (asked.leaves_open or predicts)
    asks_sharding = asked.sharding == "auto" and known.why_not_sharded is None
    return staged or (asks_sharding and known.placement.data_parallel_size > 1)


def _not_layered(traced: TraceResult) -> str | None:
    """Return why stages of one rank cannot run breadth-first; None if they can."""
    if traced.structure is None:
        return (traced.reason.splitlines() or [""])[0]
    if traced.structure.early_changes:
        return f"the step changes {traced.structure.early_changes[0]} before or between the layers"
    return None


def _exact_microbatches(traced: TraceResult, resumed: int | None) -> tuple[int, str] | None:
    """Return the only exact number of microbatches, if there is one, and why: that of the run that is resumed, or 1."""
    if traced.dependence:
        return 1, f"as in plain Lightning: {traced.dependence}; give a number to split batches all the same"
    if resumed is not None and resumed <= (traced.batch_size or resumed):
        return resumed, "as in the run that is resumed, so that random numbers go on"
    return None


def _choose(
    known: Known, asked: Asked, structure: ModuleStructure | None, costs: Costs | str | None, context: RunContext
) -> Plan:
    if structure is None or known.former is not None:
        return choose(known, asked)
    # a single pipeline rank has several stages only if they run breadth-first
    alone = known.placement.pipeline_parallel_size == 1
    cuts = structure.forbidden_cuts(one_rank=alone and known.may_be_layered(asked))
    known = replace(known, forbidden_cuts=tuple(cuts))
    if costs is None or isinstance(costs, str):
        return choose(replace(known, costs=costs), asked)
    cost_model, guessed = make_cost_model(
        costs,
        context.job,
        known.placement,
        asked,
        device=context.job.connection.device.type,
        batch_size=known.batch_size or 1,
        forbidden_cuts=known.forbidden_cuts,
    )
    plan = choose(replace(known, costs=cost_model, described=costs.described), asked)
    return replace(plan, notes=(*plan.notes, guessed)) if guessed else plan


def _not_interleaved(topology_given: bool, job: Job, structure: ModuleStructure) -> str | None:
    """Return why several stages on a rank must not be chosen; None if they may be."""
    if structure.early_changes:
        return "the module's step does not allow several stages on a rank"
    known = job.num_hosts == 1 or topology_given or job.topology.measured_at_s is not None
    # the speed that a virtual card states is unreliable, and interleaving multiplies the traffic between clusters
    if not known:
        return "interleaving is tried where links are measured: lightning-holmes topology does that"
    return None


def _kept(former: Plan | None, known: Known, asked: Asked) -> Plan | None:
    """Return the plan of the previous run, if it was for the same layers and the same placement of ranks; else None."""
    if former is None or not isinstance(asked.partition, str):
        return None
    mine = (former.layers, former.partition.num_layers, former.placement)
    return former if mine == (known.layers, known.num_layers, known.placement) else None


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
