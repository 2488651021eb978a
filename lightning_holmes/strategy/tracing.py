"""Learning a module from batches: the structure of its steps, found by tracing each on one batch.

Rank 0 traces, together with the ranks that share its layers by tensor parallelism, which talk inside the step; all
receive what rank 0 found, or the reason why the module is refused.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_holmes.comm.objects import broadcast_value
from lightning_holmes.errors import ConfigurationError, HolmesError, UnsupportedModuleError
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.batch_dependence import BatchDependence, find_batch_dependence
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.pipeline.whole_steps import describe_compute
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.strategy.samples import StepSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What is known of a module.

    Attributes:
        structure: None where nothing was traced, or no structure found.
        batch_size: samples in a training batch.
        reason: why the module runs whole: a step that cannot be followed, where nothing must be split; empty if all can.
        dependence: why its training steps are exact with one microbatch only, in a few words; empty if nothing was found,
            or where the user has given a number.
    """

    structure: ModuleStructure | None = None
    batch_size: int | None = None
    reason: str = ""
    dependence: str = ""

    def knows(self, step_name: str) -> bool:
        """Whether a step has been traced, or need not be."""
        return bool(self.reason) or (self.structure is not None and step_name in self.structure.outputs)


def trace_module(
    module: "pl.LightningModule",
    samples: Sequence[StepSample],
    options: PlanOptions,
    *,
    known: TraceResult,
    pipeline_parallel_size: int,
    traces: bool,
    device: torch.device,
    splitter: BatchSplitter,
    context: Callable[[str], Any],
) -> TraceResult:
    """``known``, and what a trace of each of ``samples`` adds. Every rank must call.

    Args:
        traces: whether this rank runs the steps: rank 0, and its tensor group.
        context: gives the context manager under which a step of that name runs.

    Raises:
        HolmesError: the module or the options are refused, on every rank alike.
    """
    answer: list[Any] = [None]
    if traces:
        try:
            with preserved_random_state(device), preserved_trainer(trainer_of(module)):
                answer = [_trace(module, samples, options, known, pipeline_parallel_size, splitter, context)]
        except HolmesError as refusal:
            answer = [refusal]
    (result,) = broadcast_value(answer)
    if isinstance(result, HolmesError):
        raise result
    assert isinstance(result, TraceResult)
    return result


def _trace(
    module: "pl.LightningModule",
    samples: Sequence[StepSample],
    options: PlanOptions,
    known: TraceResult,
    pipeline_parallel_size: int,
    splitter: BatchSplitter,
    context: Callable[[str], Any],
) -> TraceResult:
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
            if wanted not in (1, "auto"):  # the user's own way of splitting knows
                if not callable(getattr(module, "split_batch", None)):
                    raise
                size = None
        if training:
            known = replace(known, batch_size=size)
            if size is not None:
                _check_batch_size(size, wanted)
        small = tree.map_all_tensors(Tensor.clone, small)  # a step may change its batch in place
        step_context = functools.partial(context, step_name)
        before = known.structure
        layers = options.layers if training or before is None else before.layers
        found = None
        try:
            if not known.reason:
                found = trace_step(module, step_name, (small, *sample.arguments), layers=layers, context=step_context)
        except Exception as error:
            if not may_run_whole:
                raise
            known = replace(known, structure=None, reason=f"{type(error).__name__}: {error}")
        splits = size != 1 and wanted not in ((1, "auto") if alone or not training else (1,))
        if splits and (found is None or not found.changed_parameters):
            company = None
            with (
                nullcontext() if found is not None else suppress(Exception)
            ):  # what cannot be followed may not run so, either
                company = find_batch_dependence(
                    module, step_name, batch, sample.arguments, splitter, context=step_context
                )
            if company is not None:
                known = replace(known, dependence=_answer(company, step_name, wanted))
        if found is None:
            continue
        if splits and found.computed_metrics:
            metric = found.computed_metrics[0]
            if wanted != "auto":
                raise UnsupportedModuleError(describe_compute(f"{type(module).__name__}.{step_name}", metric))
            reason = f"the step calls self.{metric}.compute(), which is to see the whole batch"
            known = replace(known, dependence=known.dependence or reason)
        if splits and not known.dependence and found.kept_values:
            rank_zero_warn(_describe_kept_values(module, step_name, found.kept_values))
        # what is trained decides along which list; an evaluation step that took another is traced anew when it runs next
        if before is not None and before.layers == found.layers:
            found = before.merged(found)
        known = replace(known, structure=found)
    return known


def _answer(company: BatchDependence, step_name: str, wanted: Any) -> str:
    """Take one microbatch where nobody has given a number, and say why; warn of a number, or refuse it."""
    if wanted == "auto":
        return company.cause
    if company.is_cut_along_time:
        raise UnsupportedModuleError(f"{microbatches_argument(step_name)}={wanted}: {company.reason}")
    rank_zero_warn(company.reason)
    return ""


def microbatches_argument(step_name: str) -> str:
    """HolmesStrategy's argument for the number of microbatches of a step."""
    return "num_microbatches" if step_name == "training_step" else "eval_num_microbatches"


def _describe_kept_values(module: "pl.LightningModule", step_name: str, names: tuple[str, ...]) -> str:
    """What a step that runs for each microbatch does to attributes that it changes."""
    argument = microbatches_argument(step_name)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"{type(module).__name__}.{step_name} changes {shown} on the module. It runs once for each microbatch, so with several of "
        f"them that happens as many times a batch, where plain Lightning does it once; {argument}=1 does, too"
    )


def _check_batch_size(batch_size: int, num_microbatches: Any) -> None:
    if batch_size and isinstance(num_microbatches, int) and batch_size < num_microbatches:
        raise ConfigurationError(
            f"num_microbatches={num_microbatches} but a batch of one replica has {batch_size} samples: raise the batch "
            f"size to {num_microbatches} or more, or set num_microbatches={batch_size} or less"
        )
