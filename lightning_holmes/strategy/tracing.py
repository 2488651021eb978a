"""Tracing a module: the structure of its steps, found by running each step on one batch.

Rank 0 traces, together with the ranks of its tensor-parallel group, which communicate inside the step; all ranks
receive rank 0's result, or the error with which the module is refused.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import ConfigurationError, HolmesError, UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import microbatches_argument, splits_itself
from lightning_holmes.pipeline.batch_dependence import SAMPLES, BatchDependence, find_batch_dependence
from lightning_holmes.pipeline.own_generators import describe_draw
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.pipeline.whole_steps import describe_compute
from lightning_holmes.strategy.run_context import RunContext, step_context
from lightning_holmes.strategy.samples import StepSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What tracing has found out about a module.

    Attributes:
        structure: the structure of the module's steps; None if nothing was traced, or no structure was found.
        batch_size: the number of samples in a training batch; None if it is not known.
        reason: why the module runs whole: a step could not be traced, in a run that need not split the module; empty if all steps could.
        dependence: why its training steps are exact with one microbatch only, in a few words; empty if no reason was found.
        merges: by step, and by the name of a value that it logs, how the values of microbatches are put together (pipeline/replay.py), where
            the trial has shown another way than the usual one.
        divisors, samples: see Findings in pipeline/batch_dependence.py, of training steps.
    """

    structure: ModuleStructure | None = None
    batch_size: int | None = None
    reason: str = ""
    dependence: str = ""
    merges: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    divisors: Sequence[bool] = ()
    samples: int = SAMPLES

    def knows(self, step_name: str) -> bool:
        """Return whether a step has been traced, or need not be."""
        return bool(self.reason) or (self.structure is not None and step_name in self.structure.outputs)


def learn_steps(
    trainer: "pl.Trainer", context: RunContext, known: TraceResult, samples: Sequence[StepSample]
) -> TraceResult:
    """Trace the steps of ``samples``, and return the results merged into ``known``. Every rank must call.

    Raises:
        HolmesError: the module or the options are refused, on every rank alike.
    """
    job, device = context.job, context.job.connection.device

    def trace() -> TraceResult:
        with context.builder.stand_ins(), preserved_random_state(device), preserved_trainer(trainer):
            return _trace(trainer, context, known, samples)

    shares_layers = job.placement.coordinate(job.connection.rank)[:2] == job.place_of_rank_0[:2]
    found: TraceResult = job.connection.ask_rank_0(trace, helps=shares_layers)
    return found


def _trace(trainer: "pl.Trainer", run: RunContext, known: TraceResult, samples: Sequence[StepSample]) -> TraceResult:
    module, options, splitter = trainer.lightning_module, run.options.asked, run.splitter
    pipeline_parallel_size = run.job.placement.pipeline_parallel_size
    # of the run that is resumed: also a single stage then splits batches
    num_microbatches = run.loaded_state.num_microbatches
    alone = pipeline_parallel_size == 1
    if not (samples or alone):
        raise ConfigurationError(
            f"the data loaders give no batches (an empty data set, or limit_train_batches=0 and the like): {pipeline_parallel_size} stages need "
            f"one to trace {type(module).__name__} on; let a loader give one, or use pipeline_parallel_size=1"
        )
    may_run_whole = alone and options.layers == "auto" and isinstance(options.partition, str)
    may_run_whole &= not options.is_layered or options.num_chunks in ("auto", 1)
    for sample in samples:
        step_name, batch = sample.step_name, sample.batch
        training = step_name == "training_step"
        wanted = options.num_microbatches if training else options.eval_num_microbatches
        size: int | None
        try:
            size = splitter.batch_size(batch)
            small = batch if size <= 2 else splitter.split(batch, -(-size // 2))[0]
        except HolmesError:
            size, small = 1, batch
            if wanted not in (1, "auto"):  # only the module's split_batch, if it has one, can split this batch
                if not splits_itself(module):
                    raise
                size = None
        if training:
            known = replace(known, batch_size=size)
            if size is not None:
                _check_batch_size(size, wanted)
        context = functools.partial(step_context, trainer, step_name)
        before = known.structure
        layers = options.layers if training or before is None else before.layers
        found, failure = None, ""
        try:
            if not known.reason:
                found, failure = _trace_sample(module, sample, small, layers=layers, context=context)
                if failure and training and wanted == "auto":
                    known = replace(known, dependence=f"{step_name} fails over a part of it ({failure})")
        except Exception as error:
            if not may_run_whole:
                raise
            known = replace(known, structure=None, reason=f"{type(error).__name__}: {error}")
        is_whole = not training or (alone and (num_microbatches or 1) == 1)
        splits = size != 1 and wanted not in ((1, "auto") if is_whole else (1,))
        splits &= not (failure and wanted == "auto")
        if splits and found is not None and found.draws:
            what = found.draws[0]
            if wanted != "auto":
                raise UnsupportedModuleError(
                    f"{microbatches_argument(step_name)}={wanted}: {describe_draw(f'{type(module).__name__}.{step_name}', what)}"
                )
            splits, reason = False, f"the step draws from {what}, a generator of its own"
            known = replace(known, dependence=known.dependence or reason)
        if splits and found is not None and found.outside:
            if wanted == "auto":
                splits, reason = False, f"the step changes {found.outside[0]}"
                known = replace(known, dependence=known.dependence or reason)
            else:
                pl.utilities.rank_zero_warn(_describe_kept_values(module, step_name, found.outside))
        if splits and (found is None or not found.changed_parameters):
            company = None
            # a step that could not be traced may fail here, too
            with nullcontext() if found is not None else suppress(Exception):
                tried = find_batch_dependence(module, step_name, batch, sample.arguments, splitter, context=context)
                company = tried.dependence
                known = replace(known, merges={**known.merges, step_name: tried.merges})
                if training:
                    known = replace(known, divisors=tried.divisors, samples=tried.samples)
            if company is not None:
                if wanted != "auto":
                    _warn(company, step_name, wanted)
                if training:
                    known = replace(known, dependence=company.cause)
        if found is None:
            continue
        if splits and found.computed_metrics:
            metric = found.computed_metrics[0]
            if wanted != "auto":
                raise UnsupportedModuleError(describe_compute(f"{type(module).__name__}.{step_name}", metric))
            reason = f"the step calls self.{metric}.compute(), which is to see the whole batch"
            known = replace(known, dependence=known.dependence or reason)
        if splits and not training and found.kept_values:  # of training steps the trial has told
            pl.utilities.rank_zero_warn(_describe_kept_values(module, step_name, found.kept_values))
        # the training step decides which list of layers is used; an evaluation step that used another list is traced anew when it runs next
        if before is not None and before.layers == found.layers:
            found = before.merged(found)
        known = replace(known, structure=found)
    return known


def _trace_sample(
    module: "pl.LightningModule", sample: StepSample, small: Any, *, layers: str, context: Callable[[], Any]
) -> tuple[ModuleStructure, str]:
    """Trace a step over ``small``, a part of the sample's batch, or over all of it where the step fails over the part; return why it does, too."""
    failure = ""
    if small is not sample.batch:
        try:
            return _trace_over(module, sample, small, layers, context), ""
        except HolmesError:
            raise
        except Exception as error:
            failure = one_line(error)
    return _trace_over(module, sample, sample.batch, layers, context), failure


def _trace_over(
    module: "pl.LightningModule", sample: StepSample, batch: Any, layers: str, context: Callable[[], Any]
) -> ModuleStructure:
    batch = tree.map_all_tensors(Tensor.clone, batch)  # a step may change its batch in place
    return trace_step(module, sample.step_name, (batch, *sample.arguments), layers=layers, context=context)


def _warn(company: BatchDependence, step_name: str, wanted: int) -> None:
    """Warn of the user's number of microbatches.

    Raises:
        UnsupportedModuleError: the split cuts along time.
    """
    if company.is_cut_along_time:
        raise UnsupportedModuleError(f"{microbatches_argument(step_name)}={wanted}: {company.reason}")
    pl.utilities.rank_zero_warn(company.reason)


def _describe_kept_values(module: "pl.LightningModule", step_name: str, names: tuple[str, ...]) -> str:
    """Return a warning that a step which runs for each microbatch changes attributes of the module, or values outside of it."""
    argument = microbatches_argument(step_name)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"{type(module).__name__}.{step_name} changes {shown}. It runs once for each microbatch, so with several of "
        f"them that happens as many times a batch, where plain Lightning does it once; {argument}=1 does, too"
    )


def _check_batch_size(batch_size: int, num_microbatches: Any) -> None:
    if batch_size and isinstance(num_microbatches, int) and batch_size < num_microbatches:
        raise ConfigurationError(
            f"num_microbatches={num_microbatches} but a batch of one replica has {batch_size} samples: raise the batch "
            f"size to {num_microbatches} or more, or set num_microbatches={batch_size} or less"
        )
