"""What a step logs: recorded on every stage, merged over microbatches, replayed once per batch on all ranks.

Each stage runs the user's step up to its split point, so each sees some of its ``self.log`` calls; a call is recorded
on the stage that runs its position in the step. Lightning then sees one call per batch on every rank, as if one
process had run the whole step.
"""

import inspect
import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Placeholder
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import (
    batch_value,
    forget_computed,
    not_syncing,
    reductions,
    set_batch_value,
    set_update_count,
)
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import ONE_MICROBATCH, weighted_mean
from lightning_holmes.pipeline.stage import PipelineModule, StageRun
from lightning_holmes.pipeline.structure import BEFORE

_MERGEABLE = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LOG_OPTIONS = _LOG_SIGNATURE.parameters.keys() - {"self", "name", "value"}
MERGES = ("mean", "sum", "max", "min")
"""The ways in which a batch's value may be that of its microbatches."""
CURVED_MERGES = ("geometric", "quadratic")
"""Means that are others' functions: a perplexity is the geometric mean of those of its parts, a root of a mean square the quadratic one."""
_USUAL = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "amax": "max", "min": "min", "amin": "min"}


def log_arguments(name: str, value: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a ``self.log`` call beside name and value, by their names."""
    if args or not kwargs.keys() <= _LOG_OPTIONS:
        bound = _LOG_SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
        return {k: v for k, v in bound.items() if k in _LOG_OPTIONS}
    return kwargs


def is_logged_now(step_name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a ``self.log`` call with these arguments shows its value at once, not at the epoch's end only."""
    on_step = arguments.get("on_step")
    return step_name == "training_step" if on_step is None else bool(on_step)


def usual_merge(reduce_fx: Any) -> str:
    """How the microbatches' values of a logged value are put together unless the trial has shown another way; "" if there is none."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return _USUAL.get(kind, "")


def merge_values(way: str, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Put the microbatches' values of one logged value together: one of MERGES or CURVED_MERGES; weights count for means."""
    if way == "geometric":
        return weighted_mean([value.double().log() for value in values], weights).exp().to(values[0].dtype)
    if way == "quadratic":
        return weighted_mean([value.double().square() for value in values], weights).sqrt().to(values[0].dtype)
    if way not in ("sum", "max", "min"):
        return weighted_mean(values, weights)
    stacked = torch.stack(list(values))
    return stacked.sum() if way == "sum" else stacked.max() if way == "max" else stacked.min()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """A torchmetrics object in a log call: its name in the module and the value of its last ``forward``."""

    name: str
    batch_value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCall:
    """One ``self.log`` call: its value (a number, a tensor or a metric), its arguments, and where it was made."""

    name: str
    value: Any
    arguments: Mapping[str, Any]
    position: int
    microbatch: int


class LogRecorder:
    """Replaces ``module.log`` while a step runs, and keeps the calls of this rank's stages."""

    def __init__(self, pipeline: PipelineModule) -> None:
        self.module = pipeline.module
        self._pipeline = pipeline
        self.calls: list[LogCall] = []
        self._run: StageRun | None = None
        self._microbatch = 0
        self._has_logged = False
        self._mine: range = range(0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context for one batch in which log calls are recorded instead of made."""
        self.calls = []
        vars(self.module)["log"] = self._log
        try:
            yield
        finally:
            vars(self.module).pop("log", None)

    def enter(self, run: StageRun, microbatch: int) -> None:
        """Set the stage's step and the microbatch that run now."""
        self._run, self._microbatch, self._has_logged = run, microbatch, False
        self._thread = threading.get_ident()
        layers = self._pipeline.partition.layers_of(run.stage) if self._num_layers else range(0)
        # with the calls before the layers on the first stage, and those after them on the last
        first = BEFORE if layers.start == 0 else layers.start
        self._mine = range(first, self._num_layers + 1 if layers.stop == self._num_layers else layers.stop)

    def has_logged(self) -> bool:
        """Whether the step that runs now in this thread has logged a value of its batch."""
        run = self._pipeline.current
        is_in_step = run is not None and not run.backward and self._thread == threading.get_ident()
        return self._has_logged and is_in_step

    @property
    def _num_layers(self) -> int:
        structure = self._pipeline.structure
        return 0 if structure is None else structure.num_layers

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        run = self._run
        assert run is not None, "self.log recorded outside a stage's run"
        if run.ended:  # called in a `finally:` after StepEnd; the last stage logs it
            return
        arguments = log_arguments(name, value, *args, **kwargs)
        self._has_logged = self._has_logged or is_logged_now(run.step_name, arguments)
        position = run.position
        if position == self._num_layers - 1:
            position = self._num_layers
        if position not in self._mine:
            return
        if isinstance(value, Mapping):
            raise ValueError(f"self.log({name!r}, {{...}}) was called with a mapping; use self.log_dict")
        if isinstance(value, Metric):
            found = next((n for n, m in self.module.named_modules() if m is value), None)
            if found is None:
                raise UnsupportedModuleError(
                    f"self.log({name!r}, metric): the torchmetrics object is no attribute of the module; assign it in "
                    f"__init__, so that every rank has it"
                )
            value = MetricValue(name=found, batch_value=batch_value(value))
        elif isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"`self.log({name}, {value})` was called, but the tensor must have a single element")
            value = dtensor.whole(value.detach()).clone().reshape(())
            if isinstance(value, Placeholder):
                value.refuse()
        elif not isinstance(value, numbers.Number):
            kind = type(value).__name__
            raise ValueError(f"`self.log({name}, {value})` was called, but `{kind}` values cannot be logged")
        call = LogCall(name=name, value=value, arguments=arguments, position=position, microbatch=self._microbatch)
        self.calls.append(call)


def merge_calls(
    calls: Sequence[LogCall],
    sizes: Sequence[int],
    weights: Sequence[float],
    module: str,
    losses: Sequence[Tensor] | None = None,
    merges: Mapping[str, str] | None = None,
) -> list[LogCall]:
    """Merge the log calls of all microbatches into one call for each logged name, or several if a step logs it several times.

    A value is put together as ``merges`` has it for its name, else by its ``reduce_fx``: means are weighted by the ``batch_size``
    given to the call, else by the microbatch's weight; sums are added; of minima and maxima the least and greatest are taken.
    ``batch_size`` becomes that of the whole batch. A logged value that is the loss itself (``losses``: one per microbatch) is
    averaged like the loss, by ``microbatch_weight``, whatever its ``batch_size`` and ``reduce_fx``.
    """
    grouped: dict[tuple[str, int], list[LogCall]] = {}
    counts: dict[tuple[str, int], int] = {}
    for call in sorted(calls, key=lambda c: c.microbatch):
        nth = counts.get((call.name, call.microbatch), 0)
        counts[call.name, call.microbatch] = nth + 1
        grouped.setdefault((call.name, nth), []).append(call)
    order = {key: index for index, key in enumerate(grouped)}
    merged = []
    for key in sorted(grouped, key=lambda k: (grouped[k][0].position, order[k])):
        merged.append(_merge(grouped[key], sizes, weights, module, losses, merges or {}))
    return merged


def _merge(
    calls: list[LogCall],
    sizes: Sequence[int],
    weights: Sequence[float],
    module: str,
    losses: Sequence[Tensor] | None,
    merges: Mapping[str, str],
) -> LogCall:
    first, last = calls[0], calls[-1]
    arguments = dict(first.arguments)
    given = [c.arguments.get("batch_size") for c in calls]
    is_loss = losses is not None and all(_is_loss(c, losses) for c in calls)
    reduce_fx = arguments.get("reduce_fx", "mean")
    way = "mean" if is_loss else merges.get(first.name) or usual_merge(reduce_fx)
    if all(g is not None for g in given):
        # counts of samples or tokens add up; a plain 1 says that each batch counts once
        once = all(g == 1 for g in given) and any(sizes[c.microbatch] > 1 for c in calls)
        arguments["batch_size"] = 1 if once else sum(int(g) for g in given)  # type: ignore[arg-type, misc]
        call_weights = [float(g) for g in given]  # type: ignore[arg-type]
        if is_loss or way in CURVED_MERGES:  # functions of means that are weighted as the loss is
            call_weights = [weights[c.microbatch] for c in calls]
    else:
        call_weights = [weights[c.microbatch] for c in calls]
    if isinstance(first.value, MetricValue):
        return LogCall(name=first.name, value=last.value, arguments=arguments, position=first.position, microbatch=0)
    values = [v.value if isinstance(v.value, Tensor) else torch.tensor(v.value) for v in calls]
    if len(values) == 1:
        value: Any = calls[0].value
    else:
        if not way:
            kind = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
            raise UnsupportedModuleError(
                f"{module}: self.log({first.name!r}, reduce_fx={kind}) has no known way over microbatches; use mean, "
                f"sum, min or max, or log a torchmetrics.Metric"
            )
        value = merge_values(way, values, call_weights)
    return LogCall(name=first.name, value=value, arguments=arguments, position=first.position, microbatch=0)


def _is_loss(call: LogCall, losses: Sequence[Tensor]) -> bool:
    value, loss = call.value, losses[call.microbatch]
    return isinstance(value, Tensor) and value.device == loss.device and bool((value == loss.detach()).all())


def replay(module: pl.LightningModule, calls: Sequence[LogCall], device: torch.device) -> None:
    """Make the log ``calls`` on the module. All ranks must call, with the calls in the same order: ``sync_dist``
    reduces over the ranks."""
    for call in calls:
        value = call.value
        if isinstance(value, MetricValue):
            metric = module.get_submodule(value.name)
            assert isinstance(metric, Metric)
            if value.batch_value is not None:
                set_batch_value(metric, tree.map_tensors(lambda tensor: tensor.to(device), value.batch_value))
            value = metric
        elif isinstance(value, Tensor):
            value = value.to(device)
        module.log(call.name, value, **call.arguments)


class MetricWindow:
    """Gives logged metrics the batch value they have in plain Lightning, although ``forward`` runs once per microbatch.

    For a batch the metric is reset, so that its state is that of the batch alone; afterwards the batch value is
    computed once and the earlier state is merged in again.
    """

    def __init__(self, module: pl.LightningModule, names: Sequence[str], num_microbatches: int) -> None:
        self._metrics: list[Any] = [] if num_microbatches == 1 else [module.get_submodule(n) for n in names]
        self._names = names

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        earlier: list[tuple[Any, dict[str, Any], int]] = []
        for metric, name in zip(self._metrics, self._names, strict=False):
            mergeable = all(r in _MERGEABLE for r in reductions(metric))
            if metric.full_state_update is not False or metric.dist_sync_on_step or not mergeable:
                raise UnsupportedModuleError(
                    f"{name} ({type(metric).__name__}) is logged on each step but cannot be merged over microbatches; "
                    f"log it with on_step=False, on_epoch=True, or use {ONE_MICROBATCH}"
                )
            state = {k: list(v) if isinstance(v, list) else v for k, v in metric.metric_state.items()}
            earlier.append((metric, state, metric.update_count))
            metric.reset()
        yield
        for metric, state, count in earlier:
            own_updates = metric.update_count
            if own_updates:
                sync, metric.sync_on_compute = metric.sync_on_compute, False
                forget_computed(metric)
                with not_syncing(metric):
                    set_batch_value(metric, metric.compute())
                metric.sync_on_compute = sync
            if count:
                if own_updates:
                    metric.merge_state(state)
                else:
                    for key, value in state.items():
                        setattr(metric, key, value)
            set_update_count(metric, own_updates + count)

    def settle(self, calls: Sequence[LogCall]) -> list[LogCall]:
        """Return ``calls`` with the metric values of the whole batch in place of those recorded for a microbatch."""
        values = {
            name: MetricValue(name=name, batch_value=batch_value(metric))
            for metric, name in zip(self._metrics, self._names, strict=False)
        }
        return [
            replace(c, value=values[c.value.name]) if isinstance(c.value, MetricValue) and c.value.name in values else c
            for c in calls
        ]
