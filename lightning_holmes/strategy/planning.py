"""The plan of a run that begins: all ranks find what is known, and rank 0 chooses the plan (plan/planner.py).

    traced = learn_steps(trainer, context, TraceResult(), samples)       # every rank must call
    plan = plan_run(trainer, context, traced, samples[0])

Costs come from profiling.py. Links have the speeds that were measured on this topology before (``lightning-holmes
topology``) or at the start, or stated speeds. If there are no costs, the plan is made without them, and says why. run.py carries it out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.comm.objects import broadcast_value
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.lightning_package import pl
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.collective_choice import Sharding, choose_collectives, notes_of
from lightning_holmes.plan.groups import plan_groups
from lightning_holmes.plan.placement import make_placement
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.planner import Known, choose, complete, settle
from lightning_holmes.plan.rounding import rounded_links
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.tables import print_plan
from lightning_holmes.strategy import sharding
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.job_layout import JobLayout
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.profiling import Costs, find_costs, make_cost_model
from lightning_holmes.strategy.run_context import RunContext, step_context
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult, trace_module
from lightning_holmes.torch_private import is_compiled

_WORTH_ADVISING = 1.05  # times the samples a second


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
    layout, connection = job.layout, job.connection
    options.check_given_plan(job.topology, world_size=connection.world_size, structure=structure)
    resumed = context.loaded_state.take_num_microbatches() if training is not None else None
    known, asked = settle(
        Known(
            topology=layout.topology,
            placement=layout.placement,
            layers=None if structure is None else structure.layers,
            num_layers=0 if structure is None else structure.num_layers,
            batch_size=traced.batch_size,
            not_interleaved=None
            if structure is None
            else _not_interleaved(options.topology != "auto", layout, structure),
            not_layered=_not_layered(traced),
            may_split=not any(map(is_compiled, module.modules())),
            why_not_sharded=_why_not_sharded(trainer, options, separability, structure, may_shard_parameters),
            num_microbatches=_exact_microbatches(traced, resumed),
            notes=(*layout.notes, *_notes_of_sync(trainer, job, options.asked)),
        ),
        options.asked,
    )
    known = replace(known, former=_kept(context.former, known, asked))
    costs = None
    if structure is not None and known.former is None and _needs_costs(trainer, options.monitor, known, asked):
        costs = find_costs(trainer, context, traced, training)
    plan = _from_rank_0(connection.rank, lambda: _choose(known, asked, structure, costs, context))
    sharded, why = _choose_sharding(trainer, context, plan, structure, separability if training else None)
    plan = complete(
        plan,
        sharding=sharded,
        collectives=choose_collectives(
            asked.workers_sync,
            layout.placement,
            rounded_links(layout.topology),
            sharding=sharded,
            sockets=layout.is_gloo,
            by_links=layout.num_hosts > 1 and not torch.are_deterministic_algorithms_enabled(),
        ),
        groups=plan_groups(
            layout.placement,
            layout.pairs,
            layout.transports.describe,
            [cluster.name for cluster, _ in layout.topology.places()],
        ),
        asked=asked,
        notes=why,
    )
    if structure is not None:
        structure.check_partition(plan.partition, one_rank=plan.pipeline_parallel_size == 1)
    return plan


def _notes_of_sync(trainer: pl.Trainer, job: Job, asked: Asked) -> list[str]:
    clusters = [cluster.name for cluster, _ in job.topology.places()]
    fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
    return notes_of(asked.gradient_sync, job.placement, clusters) if fitting else []


def _needs_costs(trainer: pl.Trainer, monitor: bool | int, known: Known, asked: Asked) -> bool:
    """Whether something is left to decide by costs, or a prediction is wanted."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    predicts = bool(monitor) or any(isinstance(c, TimelineMonitor) for c in callbacks)
    staged = known.placement.pipeline_parallel_size > 1 and (asked.leaves_open or predicts)
    asks_sharding = asked.sharding == "auto" and known.why_not_sharded is None
    return staged or (asks_sharding and known.placement.data_parallel_size > 1)


def _why_not_sharded(
    trainer: pl.Trainer,
    options: Options,
    separability: Separability | None,
    structure: ModuleStructure | None,
    may_shard_parameters: bool,
) -> str | None:
    """Return why parameters cannot live in shards with ``sharding="auto"``; None if they can."""
    if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
        return "nothing is trained"
    if not may_shard_parameters:
        return "whole ones fit"
    optimizer = next(iter(trainer.strategy.optimizers), None)
    return sharding.why_not_sharded(
        separability, optimizer, trainer, compression=options.compression, structure=structure
    )


def _choose_sharding(
    trainer: pl.Trainer,
    context: RunContext,
    plan: Plan,
    structure: ModuleStructure | None,
    separability: Separability | None,
) -> tuple[Sharding, list[str]]:
    """Return what is sharded over the replicas, and a note. Every rank must call."""
    asked, connection, module = context.options.asked, context.job.connection, trainer.lightning_module
    if asked.optimizer_nodes:
        return "none", []  # nodes hold everything
    if asked.sharding == "parameters" or plan.sharding == "parameters":
        return "parameters", []
    if separability is None:
        return "none", []
    names = {name for name, _ in module.named_parameters()}
    if structure is not None:
        own, _, _ = plan.placement.coordinate(connection.rank)
        names = set().union(*(structure.parameters_of(plan.partition, stage) for stage in plan.stages_of(own)))
    (optimizer,) = trainer.strategy.optimizers
    on, reason = sharding.choose_sharding(
        context.options,
        separability,
        optimizer,
        trainer,
        names,
        predicted=plan.prediction is not None and plan.prediction.sharded_optimizer,
        data_parallel_size=plan.data_parallel_size,
        device=connection.device,
        gather=connection.all_gather,
    )
    return "optimizer" if on else "none", [f"sharding: {'optimizer' if on else 'none'}, {reason}"] if reason else []


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


def _from_rank_0(rank: int, make: Callable[[], Plan]) -> Plan:
    """Return rank 0's plan, or raise its error, on all ranks."""
    answer: list[Any] = [None]
    if rank == 0:
        try:
            answer = [make()]
        except HolmesError as refusal:
            answer = [refusal]
    answer = broadcast_value(answer)
    if isinstance(answer[0], HolmesError):
        raise answer[0]
    plan: Plan = answer[0]
    return plan


def _choose(
    known: Known, asked: Asked, structure: ModuleStructure | None, costs: Costs | str | None, context: RunContext
) -> Plan:
    if structure is None or known.former is not None:
        return choose(known, asked)
    size = known.placement.pipeline_parallel_size
    known = replace(known, forbidden_cuts=_forbidden_cuts(known, asked, structure, size))
    if costs is None or isinstance(costs, str):
        return choose(replace(known, costs=costs), asked)
    fill = functools.partial(_with_costs, costs=costs, asked=asked, context=context)
    known, guessed = fill(known)
    plan = choose(known, asked)
    notes = [guessed] if guessed else []
    if plan.prediction is not None and asked.pipeline_parallel_size == "auto" and isinstance(asked.partition, str):
        others = {}
        for length in _other_lengths(size, known.placement.world_size, structure.num_layers):
            placement = make_placement(
                known.topology, world_size=known.placement.world_size, pipeline_parallel_size=length
            )
            cuts = _forbidden_cuts(known, asked, structure, length)
            other, unknown = fill(replace(known, placement=placement, forbidden_cuts=cuts))
            # if the speeds of the chosen layout's links are known, leave out lengths for which they would have to be guessed, and the reverse
            if bool(unknown) == bool(guessed):
                others[length] = other
        notes += _describe_others(plan, others, asked)
    return replace(plan, notes=(*plan.notes, *notes))


def _with_costs(known: Known, *, costs: Costs, asked: Asked, context: RunContext) -> tuple[Known, str]:
    """Return ``known`` with the costs of its placement, and a note if links have no known speed, else ""."""
    cost_model, note = make_cost_model(
        costs,
        context.job.layout,
        known.placement,
        asked,
        device=context.job.connection.device.type,
        batch_size=known.batch_size or 1,
        forbidden_cuts=known.forbidden_cuts,
    )
    return replace(known, costs=cost_model, described=costs.described), note


def _forbidden_cuts(known: Known, asked: Asked, structure: ModuleStructure, size: int) -> tuple[int, ...]:
    """Return the split points that lose a value; a single pipeline rank has several stages only if they run breadth-first."""
    return tuple(structure.forbidden_cuts(one_rank=size == 1 and known.may_be_layered(asked)))


def _other_lengths(size: int, world_size: int, num_layers: int) -> list[int]:
    """Return the next smaller and the next larger pipeline size that the number of ranks allows."""
    possible = [n for n in range(1, num_layers + 1) if world_size % n == 0]
    return [*[n for n in possible if n < size][-1:], *[n for n in possible if n > size][:1]]


def _describe_others(plan: Plan, others: dict[int, Known], asked: Asked) -> list[str]:
    """Return a note with the predicted speed of other pipeline sizes, and advice if one is faster. The groups of ranks and the parts of the
    data are made before the first batch, from which costs are known, so that they are not chosen here: lightning-holmes plan does that."""
    shown = []
    assert plan.prediction is not None
    ratios: dict[int, float] = {}
    for length, known in others.items():
        try:
            found = choose(known, asked).prediction
        except NothingFitsError:
            shown.append(f"{length}: does not fit the memory")
            continue
        except ConfigurationError:  # the options do not fit this length
            continue
        if found is not None:
            ratios[length] = found.samples_per_s / plan.prediction.samples_per_s
            shown.append(f"{length}: {ratios[length]:.2f}x")
    if not shown:
        return []
    advice = ""
    fastest = max(ratios, key=lambda length: ratios[length], default=None)
    if fastest is not None and ratios[fastest] > _WORTH_ADVISING:
        advice = (
            f"; give pipeline_parallel_size={fastest}, with which there are other replicas and so another global batch"
        )
    return [f"samples a second by prediction with another pipeline_parallel_size: {', '.join(shown)}{advice}"]


def _not_interleaved(topology_given: bool, layout: JobLayout, structure: ModuleStructure) -> str | None:
    """Return why several stages on a rank must not be chosen; None if they may be."""
    if structure.early_changes:
        return "the module's step does not allow several stages on a rank"
    known = layout.num_hosts == 1 or topology_given or layout.topology.measured_at_s is not None
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


def learn_steps(
    trainer: pl.Trainer,
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
            context.options.asked,
            known=known,
            pipeline_parallel_size=job.placement.pipeline_parallel_size,
            traces=traces,
            device=connection.device,
            splitter=context.splitter,
            context=functools.partial(step_context, trainer),
        )


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
