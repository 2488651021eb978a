"""Calls that are allowed in a whole step only, not in a part of one: that of a pipeline stage, or of one of several microbatches.

A collective would wait for stages that never reach it, or gather microbatches in place of batches. ``compute`` of a
metric would give the value of the samples so far. If one process runs each batch whole, all of these work as in plain
Lightning.

    raise UnsupportedModuleError(describe_collective("training_step", "all_gather"))
    with refusing_collectives(copy, "training_step"): step(batch)      # on a copy, which not every rank runs
    with noticing_compute(metrics, names.append), refusing_loggers(module, "training_step"): step(part)
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline.batch import ONE_MICROBATCH
from lightning_holmes.pipeline.noticed_functions import ALL, NoticedFunctions
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import BEFORE
from lightning_holmes.replacements import Replacements

COLLECTIVES = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
"""The collectives of Lightning's Strategy."""
_GRADIENT: Any = Tensor.grad
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_KEEP = "ask once, in setup(), as self.folder = self.trainer.log_dir, and use self.folder in the step"


def asks_for_log_dir() -> bool:
    """Whether the calling function was called, directly or indirectly, by ``Trainer.log_dir``."""
    code = pl.Trainer.log_dir.fget.__code__  # type: ignore[attr-defined]
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(None))


def describe_collective(step: str, name: str) -> str:
    """The message on why ``step`` may not call a collective of Lightning's, and what to do instead. Call this inside
    of that collective: the call stack is searched for ``Trainer.log_dir``."""
    if asks_for_log_dir():
        return (
            f"{step} reads self.trainer.log_dir, which takes a broadcast to all ranks, and the stages of a pipeline, or "
            f"microbatches, run different parts of a step: {_KEEP}"
        )
    what = "self.all_gather" if name == "all_gather" else f"the strategy's {name}"
    return (
        f"{step} calls {what}: the stages of a pipeline run different parts of a step, so a collective inside it would hang, "
        f"and microbatches would meet in place of batches; call it in a batch-end or epoch-end hook, or use "
        f"pipeline_parallel_size=1 and num_microbatches=1"
    )


def describe_logger_folder(step: str, attribute: str) -> str:
    """The message on why ``step`` may not ask a logger for its folder, and what to do instead. Call this inside of
    that access, as for describe_collective."""
    what = "self.trainer.log_dir" if asks_for_log_dir() else f"self.logger.{attribute}"
    return f"{step} reads {what}, and only rank 0's loggers know where they write, which the last stage may not be: {_KEEP}"


@contextmanager
def refusing_collectives(module: pl.LightningModule, step: str) -> Iterator[None]:
    """Context in which ``module`` and its trainer's strategy refuse Lightning's collectives.

    Raises:
        UnsupportedModuleError: names the collective and what to do instead.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedModuleError(describe_collective(step, name))

        return refuse

    trainer = trainer_of(module)
    with Replacements() as refusing:
        refusing.replace(module, all_gather=refused("all_gather"))
        if trainer is not None:
            refusing.replace(trainer.strategy, **{name: refused(name) for name in COLLECTIVES})
        yield


def describe_call(step: str, name: str) -> str:
    """The message on why a part of a step may not call a function or read what it names, and what to do instead: "backward" and "grad" of
    torch.autograd, ".grad" of a parameter, the ``log`` of a module below, or a collective."""
    if name == "backward":
        return f"{step} calls backward: a pipeline runs the backward itself; return one loss that holds all parts"
    if name == "grad":
        what = "no stage holds the whole graph; use pipeline_parallel_size=1 and num_microbatches=1 with the default sharding"
        return f"{step} calls torch.autograd.grad after layers have run: {what}"
    if name == ".grad":
        what = "those of the batch before are gone by then, and a stage has its own only; read them in on_before_optimizer_step"
        return f"{step} reads .grad of a parameter: {what}"
    if name.endswith(".log"):
        return (
            f"{step} logs through {name}: only what the outermost LightningModule logs can be brought to all ranks; return the value "
            f"and log it there"
        )
    return (
        f"{step} calls the collective {name}: the stages of a pipeline run different parts of a step, and microbatches too, so it "
        f"would hang; use pipeline_parallel_size=1 and num_microbatches=1 with the default sharding"
    )


class CallsInParts:
    """Refuses in parts of later batches, too, what a trace refuses in the first: a branch may begin later."""

    def __init__(self, pipeline: PipelineModule) -> None:
        self._pipeline = pipeline
        self._collectives = NoticedFunctions(torch.distributed, ALL)
        self._autograd = NoticedFunctions(torch.autograd, ("backward", "grad"))
        self._nested = [(n, m) for n, m in pipeline.module.named_modules() if n and isinstance(m, pl.LightningModule)]

    @contextmanager
    def refusing(self, place: str) -> Iterator[None]:
        """Context for a batch, in which the forwards of its parts may not do what :func:`describe_call` names.

        Raises:
            UnsupportedModuleError: one of them does; the message says what, and what to do instead.
        """

        def refuse(name: str, *_: Any, **__: Any) -> None:
            run = self._pipeline.current
            if run is None or run.backward:
                return
            if name != "grad" or not (self._pipeline.num_stages == 1 or run.position == BEFORE or run.inside):
                raise UnsupportedModuleError(describe_call(place, name))

        with Replacements() as run, self._autograd.noticing(refuse):
            for name, module in self._nested:
                run.replace(module, log=functools.partial(refuse, f"{name}.log"))
            with self._collectives.noticing(refuse, of_any_group=True):
                yield


@contextmanager
def refusing_gradients(pipelines: Callable[[], Sequence[PipelineModule]]) -> Iterator[None]:
    """Inside, the forward of a training step may not read ``.grad`` of a parameter; ``pipelines``: those of which a step may run.

    Raises:
        UnsupportedModuleError: it does.
    """

    def read(parameter: nn.Parameter) -> Any:
        for pipeline in pipelines():
            run = pipeline.current
            if run is not None and not run.backward and (run.step_name == "training_step" or pipeline.num_stages > 1):
                frame = inspect.currentframe()
                caller = None if frame is None else frame.f_back
                file = "" if caller is None else caller.f_globals.get("__name__", "")
                if caller is not None and caller.f_code.co_name != "zero_grad" and not file.startswith("torch._"):
                    raise UnsupportedModuleError(
                        describe_call(f"{type(pipeline.module).__name__}.{run.step_name}", ".grad")
                    )
        return _GRADIENT.__get__(parameter)

    with Replacements() as run:
        run.replace(nn.Parameter, grad=property(read, _GRADIENT.__set__, _GRADIENT.__delete__))
        yield


class _LoggerProbe:
    """Stands in for a logger while a part of a step runs, also to ``isinstance``; ``notice`` is called before each use of an attribute."""

    def __init__(self, logger: Any, notice: Callable[[str], None]) -> None:
        self._logger, self._notice = logger, notice

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._notice(name)
        return getattr(self._logger, name)


@contextmanager
def noticing_loggers(module: pl.LightningModule, notice: Callable[[str], None]) -> Iterator[None]:
    """Context in which ``notice`` is called with the name of each attribute of a logger of ``module``'s trainer that is used directly."""
    trainer = trainer_of(module)
    if trainer is None:
        yield
        return
    loggers = trainer.loggers
    trainer.loggers = [_LoggerProbe(logger, notice) for logger in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def refusing_loggers(module: pl.LightningModule, step: str) -> AbstractContextManager[None]:
    """Context in which the loggers of ``module``'s trainer refuse to be used: only ``self.log`` reaches them from a pipeline's stages.

    Raises:
        UnsupportedModuleError: names what is used, and what to do instead.
    """

    def refuse(name: str) -> None:
        if name in ("save_dir", "log_dir", "root_dir"):
            raise UnsupportedModuleError(describe_logger_folder(step, name))
        raise UnsupportedModuleError(
            f"{step} uses self.logger directly (.{name}): loggers are on rank 0, which holds the first stage "
            f"and never sees the loss; use self.log, or log from a hook at the end of a batch or an epoch"
        )

    return noticing_loggers(module, refuse)


@contextmanager
def refusing_metrics(step: str, has_logged: Callable[[], bool]) -> Iterator[None]:
    """Context in which ``step`` may not read its trainer's metrics while it ``has_logged``: Lightning hears of the calls after the batch.

    Raises:
        UnsupportedModuleError: it does.
    """

    def checked(name: str) -> property:
        known: Any = getattr(pl.Trainer, name)

        def read(trainer: pl.Trainer) -> Any:
            if has_logged():
                raise UnsupportedModuleError(
                    f"{step} reads self.trainer.{name} after a self.log of its own: what it logs is there after the batch, once stages and "
                    f"microbatches are put together. Use the value that was logged, or read before the first self.log, or in a hook"
                )
            return known.fget(trainer)

        return property(read)

    with Replacements() as run:
        run.replace(pl.Trainer, **{name: checked(name) for name in _METRICS})
        yield


def describe_compute(step: str, metric: str) -> str:
    """The message on why ``step`` may not compute a metric if it runs once for each microbatch, and what to do instead."""
    return (
        f"{step} calls self.{metric}.compute(), and runs once for each microbatch, so that the value would be that of the "
        f"samples so far: log the metric itself, self.log(..., self.{metric}), or use {ONE_MICROBATCH}"
    )


@contextmanager
def noticing_compute(metrics: Mapping[str, Metric], notice: Callable[[str], None]) -> Iterator[None]:
    """Context in which ``notice`` is called with a metric's name before each ``compute`` that no metric's ``forward`` calls."""
    depth = 0

    def inside(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_inside(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                depth -= 1

        return forward_inside

    def told(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def tell_and_compute(*args: Any, **kwargs: Any) -> Any:
            if depth == 0:
                notice(name)
            return compute(*args, **kwargs)

        return tell_and_compute

    with Replacements() as noticing:
        for name, metric in metrics.items():
            noticing.replace(metric, forward=inside(metric.forward), compute=told(name, metric.compute))
        yield
