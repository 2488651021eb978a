"""Find steps whose results depend on which samples are in a batch together: microbatches cannot give the same numbers.

Batch normalisation, negatives taken from the batch, means over tokens with padding: no splitting is exact for these,
in any library. They are found by a trial without dropout on copies of the module: the loss of a few samples together
is compared with the weighted mean of the losses of their halves, and so are its gradients, since two losses may be
alike by chance, every value that is logged, and what the step leaves on the module. Buffers that every run of the step
changes (a spectral norm's vectors, running means) are found in the same way. So are batches whose first dimension is
time, not samples: layers that know which dimension is time (``batch_first``) show that its length changes with the split.

    found, merges = find_batch_dependence(module, "training_step", batch, (0,), splitter)
    found.reason, found.is_cut_along_time       # found is None if nothing was found
    merges["tokens"]                            # "sum": the whole batch's value is the sum of its parts'
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.attributes import changes, snapshot, value_at
from lightning_holmes.pipeline.batch import BatchSplitter, merge_outputs, weighted_mean
from lightning_holmes.pipeline.object_state import is_plain
from lightning_holmes.pipeline.replay import MERGES, log_arguments, merge_values, usual_merge
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.seeds import preserved_random_state, seed_all
from lightning_holmes.pipeline.shadow import shadow_copy
from lightning_holmes.pipeline.whole_steps import refusing_collectives
from lightning_holmes.torch_private import is_batch_norm, is_dropout

_SAMPLES = 4
_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE_16 = 1e-3, 5e-2
"""Of the norm of gradients, in fp32 and in 16 bits, whose matrix products are rounded differently for other batch sizes."""
_GRADIENT_ELEMENTS = 1 << 20
_Lengths = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDependence:
    """The dependence that was found. reason: in whole sentences. cause: in a few words."""

    reason: str
    cause: str
    is_cut_along_time: bool = False


def find_batch_dependence(
    module: pl.LightningModule,
    step_name: str,
    batch: Any,
    arguments: tuple[Any, ...],
    splitter: BatchSplitter,
    *,
    context: Callable[[], Any] | None = None,
) -> tuple[BatchDependence | None, dict[str, str]]:
    """Find why splitting a batch changes the results of a step of ``module``; None if no dependence is found.

    The loss of a step that draws random numbers other than for dropout (noise, time steps) cannot be judged.

    Returns:
        The dependence, and how the parts of logged values are put together where that is not the usual way (replay.MERGES).
    """
    trains = step_name == "training_step"
    name = type(module).__name__
    norms = [n for n, m in module.named_modules() if is_batch_norm(m) and m.training] if trains else []
    trial = _Trial(module, step_name, arguments, context)
    parts = _parts(module, batch, splitter)
    found, moved = _Differences(), []
    if parts is not None:
        small, halves, weights = parts
        with preserved_random_state(trial.device_of(small)):
            if not callable(getattr(module, "split_batch", None)):
                time = _read_as_time(trial.lengths(small), trial.lengths(halves[0]))
                if time is not None:
                    return _cut_along_time(name, step_name, time), {}
            if trains and all(m.track_running_stats for m in module.modules() if is_batch_norm(m)):
                found = _find_differences(trial, small, halves, weights)
            moved = _moved_buffers(trial, small, halves)
    reasons, causes = [], []
    if norms:
        shown = _some(norms)
        reasons.append(
            f"{name} has batch normalisation ({shown}): its statistics run over a microbatch, so results equal those of "
            f"plain Lightning with the microbatch as batch, not with the whole batch; GroupNorm and LayerNorm are exact"
        )
        causes.append(f"batch normalisation ({shown}) takes its statistics from it")
    if found.failure:
        reasons.append(
            f"{step_name} of {name} runs over a few samples and fails over a half of them ({found.failure}): with several microbatches it "
            f"runs over parts of a batch; define `split_batch(self, batch, num_microbatches) -> list`, or use num_microbatches=1"
        )
        causes.append(f"the step fails over a part of it ({found.failure})")
    if found.loss is not None:
        together, apart = found.loss
        reasons.append(
            f"the loss of {name} over a few samples is {together:.6g}, the mean over their halves "
            f"{apart:.6g}: it depends on which samples are together, as with negatives taken from the batch or a mean "
            f"over tokens with padding. Microbatches then give the numbers of plain Lightning with the microbatch as batch; "
            f"for a mean over tokens define `microbatch_weight(self, batch)`, the number of tokens, or use num_microbatches=1"
        )
        causes.append("the loss depends on which samples are in it")
    elif found.gradient:
        reasons.append(
            f"the gradients of {name} over a few samples and the mean of those over their halves are {found.gradient:.1%} apart: they depend "
            f"on which samples are together, as with a mean over tokens with padding, where `microbatch_weight(self, batch)` may return "
            f"the number of tokens; or use num_microbatches=1"
        )
        causes.append("the gradients depend on which samples are in it")
    if found.logged:
        reasons.append(
            f"what {step_name} of {name} logs as {_some(found.logged)} is no mean, sum, least or greatest value over the parts of a batch: "
            f"with several microbatches it is the mean over them; log a torchmetrics.Metric, or use num_microbatches=1"
        )
        causes.append(f"what it logs as {_some(found.logged)} is no mean over its parts")
    if found.output and found.loss is None:
        reasons.append(f"{step_name} of {name}: {found.output}; num_microbatches=1 returns what plain Lightning does")
        causes.append("the step's output cannot be put together from its parts")
    if found.kept:
        reasons.append(
            f"{step_name} of {name} leaves self.{_some(found.kept)} on the module, once for each microbatch: it is that of the last one, or "
            f"counts each of them; num_microbatches=1 leaves what plain Lightning does"
        )
        causes.append(f"the step leaves self.{_some(found.kept)} on the module")
    if moved:
        shown = _some(moved)
        reasons.append(
            f"{step_name} of {name} changes buffers ({shown}) each time it runs, which is once for each microbatch: with several of "
            f"them they, and what is computed from them, are other than those of plain Lightning with the whole batch"
        )
        causes.append(f"each run of the step changes buffers ({shown})")
    dependence = BatchDependence(reason="; ".join(reasons), cause=", and ".join(causes)) if reasons else None
    return dependence, found.merges


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _parts(
    module: pl.LightningModule, batch: Any, splitter: BatchSplitter
) -> tuple[Any, list[Any], list[float]] | None:
    """A few samples (the whole batch if the module has ``split_batch``), their halves, and the weights of the halves;
    None if the batch cannot be split like this."""
    own, weigh = getattr(module, "split_batch", None), getattr(module, "microbatch_weight", None)
    try:
        if callable(own):
            small, halves = batch, list(own(batch, 2))
        else:
            size = splitter.batch_size(batch)
            count = min(_SAMPLES, size)
            if count < 2:
                return None
            small = splitter.split(batch, -(-size // count))[0]
            halves = splitter.split(small, 2)
        weights = [float(weigh(h) if callable(weigh) else splitter.batch_size(h)) for h in halves]
    except UnsupportedModuleError:  # the run itself reports the reason
        return None
    if not all(0 <= weight < float("inf") for weight in weights):
        return None  # refused by name in the step
    return small, halves, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What runs of a step over some samples have given.

    ``output``: what the step returned. ``gradients``: those of some small parameters, with ``gradient_tolerance``. ``logged``: by name and count of the call, the value and
    its ``reduce_fx``. ``kept``: what has changed on the module, by path; only numbers, texts, tensors and containers of these.
    """

    loss: Tensor
    output: Any
    gradients: Sequence[Tensor] = ()
    gradient_tolerance: float = _GRADIENT_TOLERANCE
    logged: Mapping[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """Where a step over samples together and steps over their halves differ."""

    loss: tuple[float, float] | None = None
    gradient: float = 0.0
    logged: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    output: str = ""
    merges: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """Why the step fails over a half, where it does not over the samples together."""

    @property
    def is_none(self) -> bool:
        return self.loss is None and not (self.gradient or self.logged or self.kept or self.output)


def _find_differences(trial: "_Trial", small: Any, halves: list[Any], weights: list[float]) -> _Differences:
    """Compare a step over the samples together with steps over their halves.

    Copying the module takes longer than such a step, so at first there are two copies: one for the samples together,
    and one for the halves in turn, as in a run with two microbatches. If something then differs, or a step fails, the
    reason may be chance, or state that an earlier step has left: a second run of the same samples shows what differs from
    run to run and cannot be judged, and loss, gradients and logs are those of a copy for each half.
    """
    together = trial.outcome(trial.copy(), [small], 1)[0]
    if not bool(together.loss.isfinite().all()):
        return _Differences()
    try:
        in_turn = trial.outcome(trial.copy(), halves, 1)
        found = _compare(together, in_turn, weights)
        if found.is_none:
            return found
        kept = found.kept
    except Exception:
        kept = []
    again = trial.outcome(trial.copy(), [small], 2)[0]
    try:
        apart = [trial.outcome(trial.copy(), [half], 1)[0] for half in halves]
    except UnsupportedModuleError:
        raise
    except Exception as error:
        return _Differences(failure=one_line(error))
    found, chance = _compare(together, apart, weights), _compare(together, [again], [1.0])
    return replace(
        found,
        loss=None if chance.loss is not None else found.loss,
        gradient=0.0 if chance.loss is not None or chance.gradient else found.gradient,
        logged=[name for name in found.logged if name not in chance.logged],
        output="" if chance.output else found.output,
        kept=[name for name in kept if name not in chance.kept],
    )


def _compare(together: _Outcome, parts: Sequence[_Outcome], weights: Sequence[float]) -> _Differences:
    apart = weighted_mean([part.loss for part in parts], list(weights))
    logged, merges = _compare_logged(together, parts, weights)
    last = parts[-1].kept
    return _Differences(
        loss=None if _agree(together.loss, apart) else (together.loss.item(), apart.item()),
        gradient=_gradient_difference(together, parts, weights),
        logged=logged,
        kept=[name for name, value in together.kept.items() if name not in last or not _alike(value, last[name])],
        output=_compare_output(together, parts, weights),
        merges=merges,
    )


def _compare_output(together: _Outcome, parts: Sequence[_Outcome], weights: Sequence[float]) -> str:
    """Why the step's output cannot be put together from its parts, or a number in it is no mean over them; "" if neither is so."""
    sizes = [round(weight) for weight in weights]
    try:
        merged = merge_outputs([part.output for part in parts], sizes, list(weights), "what it returns")
    except UnsupportedModuleError as reason:
        return str(reason)
    pairs = list(zip(tree.tensors_of(together.output), tree.tensors_of(merged), strict=False))
    if any(one.shape != other.shape for one, other in pairs):
        return "a tensor that it returns cannot be put together from those of the parts of a batch, as one entry a sample can"
    if any(one.ndim == 0 and not _agree(one.detach().double(), other.detach().double()) for one, other in pairs):
        return "a number that it returns is no mean over the parts of a batch"
    return ""


def _agree(together: Tensor, apart: Tensor) -> bool:
    return float((apart - together).abs().max() / together.abs().max().clamp_min(1e-12)) <= _TOLERANCE


def _gradient_difference(together: _Outcome, parts: Sequence[_Outcome], weights: Sequence[float]) -> float:
    """The distance of the gradients, relative to their norm; 0 if it is within rounding."""
    total = sum(weights)
    if not together.gradients or not total or any(len(part.gradients) != len(together.gradients) for part in parts):
        return 0.0
    distance = norm = 0.0
    for number, whole in enumerate(together.gradients):
        mean = sum(part.gradients[number] * (weight / total) for part, weight in zip(parts, weights, strict=True))
        distance += float((whole - mean).square().sum())
        norm += float(whole.square().sum())
    found = math.sqrt(distance / norm) if norm > 0 else 0.0
    return found if found > together.gradient_tolerance else 0.0


def _compare_logged(
    together: _Outcome, parts: Sequence[_Outcome], weights: Sequence[float]
) -> tuple[list[str], dict[str, str]]:
    """The names of logged values that no way of putting their parts together gives, and that way for those where it is not the usual one."""
    differing, merges = [], {}
    for (name, nth), (value, reduce_fx) in together.logged.items():
        found = [part.logged.get((name, nth)) for part in parts]
        values = [entry[0] for entry in found if entry is not None]
        if len(values) < len(parts):
            continue  # logged in some parts only
        usual = usual_merge(reduce_fx)
        fitting = [
            way
            for way in dict.fromkeys((usual, *MERGES))
            if _agree(value, merge_values(way, values, list(weights)).double())
        ]
        if not fitting:
            differing.append(name)
        elif fitting[0] != usual:
            merges[name] = fitting[0]
    return list(dict.fromkeys(differing)), merges


def _alike(left: Any, right: Any) -> bool:
    """Whether two values that a step has left are the same but for rounding."""
    if isinstance(left, (Tensor, np.ndarray, np.generic)) and isinstance(right, type(left)):
        one, other = torch.as_tensor(left), torch.as_tensor(right)
        if one.shape != other.shape or not one.is_floating_point():
            return torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=1e-8, equal_nan=True)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=1e-8) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if tree.is_container(left) and type(left) is type(right):
        mine, theirs = (tree.children_of(value) for value in (left, right))
        return len(mine) == len(theirs) and all(_alike(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
    if type(left) is not type(right):
        return False
    return bool(left == right)


def _moved_buffers(trial: "_Trial", small: Any, halves: list[Any]) -> list[str]:
    """The names of buffers that have other values after a step over the samples together than after steps over their
    halves in turn."""
    if not trial.has_buffers:
        return []
    before, together = trial.buffers_after([small])
    if _differing(before, together):
        return _differing(together, trial.buffers_after(halves)[1])
    return []


def _differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name, value in left.items() if name not in right or not _is_close(value, right[name])]


def _is_close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or not left.is_floating_point():
        return torch.equal(left, right)
    largest = float(left.abs().max().nan_to_num()) if left.numel() else 0.0
    rounding = 16 * torch.finfo(left.dtype).eps  # sums are rounded
    return torch.allclose(left, right, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _cut_along_time(name: str, step_name: str, layer: str) -> BatchDependence:
    return BatchDependence(
        reason=(
            f"the first dimension of the batches of {name}.{step_name} is time to {layer}: split along it, a sequence is cut in "
            f"pieces. Define `split_batch(self, batch, num_microbatches) -> list`, which cuts along samples, let batches have "
            f"samples first, or use one microbatch"
        ),
        cause=f"the first dimension is time to {layer}",
        is_cut_along_time=True,
    )


def _read_as_time(lengths: _Lengths, shorter: _Lengths) -> str | None:
    """The name of a layer for which the dimension that was split is time; None if there is none."""
    for name, (time, samples) in lengths.items():
        other_time, other_samples = shorter.get(name, (time, samples))
        if time != other_time and samples == other_samples:
            return name
    return None


class _Trial:
    """Runs a step on copies of a module, without dropout and with batch normalisation's running statistics."""

    def __init__(
        self,
        module: pl.LightningModule,
        step_name: str,
        arguments: tuple[Any, ...],
        context: Callable[[], Any] | None,
    ) -> None:
        self._module = module
        self._step_name = step_name
        self._arguments = arguments
        self._context = context

    @staticmethod
    def device_of(batch: Any) -> torch.device:
        return next((t.device for t in tree.tensors_of(batch)), torch.device("cpu"))

    @property
    def has_buffers(self) -> bool:
        return next(self._module.buffers(), None) is not None

    def outcome(self, copy: pl.LightningModule, batches: Sequence[Any], seed: int) -> list[_Outcome]:
        """The outcome of steps over ``batches`` in turn; what is kept on the copy is that after all of them."""
        found = []
        before = snapshot(copy)
        for batch in batches:
            logged: dict[tuple[str, int], tuple[Any, Any]] = {}
            vars(copy)["log"] = functools.partial(_note, logged)
            with torch.enable_grad():
                output = self._run(copy, batch, seed)
                loss = loss_of(output, self._step_name)
                gradients = _gradients(copy, loss)
            tolerance = _GRADIENT_TOLERANCE if self._computes_in_fp32(copy) else _GRADIENT_TOLERANCE_16
            found.append(
                _Outcome(
                    loss=loss.detach().double(),
                    output=output,
                    gradients=gradients,
                    gradient_tolerance=tolerance,
                    logged=logged,
                )
            )
        vars(copy)["log"] = lambda *_, **__: None
        kept = {}
        for owner, path in changes(before, snapshot(copy)):
            value = value_at(copy, owner, path)
            if is_plain(value) and not isinstance(copy.get_submodule(owner), Metric):
                kept[".".join(filter(None, (owner, *path)))] = value
        return [*found[:-1], replace(found[-1], kept=kept)]

    def _computes_in_fp32(self, copy: pl.LightningModule) -> bool:
        with self._context() if self._context is not None else nullcontext():
            low = torch.is_autocast_enabled("cpu") or (torch.cuda.is_available() and torch.is_autocast_enabled("cuda"))
        return not low and all(p.element_size() >= 4 for p in copy.parameters())

    def buffers_after(self, batches: list[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The buffers before and after a step over each of ``batches`` in turn.

        Their values are perturbed first, because a buffer that has converged (a power iteration) would hardly change.
        """
        copy = self.copy()
        for buffer in copy.buffers():
            if buffer.is_floating_point() and buffer.is_contiguous():
                push = torch.arange(buffer.numel(), dtype=buffer.dtype, device=buffer.device).cos().view_as(buffer)
                with torch.no_grad():
                    buffer.mul_(1 + push / 8)
        before = {name: buffer.clone() for name, buffer in copy.named_buffers()}
        with torch.no_grad():
            for batch in batches:
                self._run(copy, batch, 1)
        return before, dict(copy.named_buffers())

    def lengths(self, batch: Any) -> _Lengths:
        """By layer name, the lengths (time, samples) of the first tensor argument of layers with ``batch_first``."""
        found: _Lengths = {}
        if not any(map(_knows_time, self._module.modules())):
            return found

        def note(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sequence = next((t for t in tree.tensors_of((args, kwargs))), None)
            if sequence is not None and sequence.ndim > 2:
                first, second, *_ = sequence.shape
                found.setdefault(name, (second, first) if layer.batch_first else (first, second))

        copy = self.copy()
        for name, layer in copy.named_modules():
            if _knows_time(layer):
                layer.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
        with torch.no_grad():
            self._run(copy, batch, 1)
        return found

    def copy(self) -> pl.LightningModule:
        copy = shadow_copy(self._module)
        if self._step_name != "training_step":
            copy.eval()
        for submodule in copy.modules():
            if is_dropout(submodule) or is_batch_norm(submodule):
                submodule.eval()
        set_trainer(copy, trainer_of(self._module))
        vars(copy)["log"] = lambda *_, **__: None
        return copy

    def _run(self, copy: pl.LightningModule, batch: Any, seed: int) -> Any:
        seed_all(seed, self.device_of(batch))
        step = getattr(copy, self._step_name)
        alone = refusing_collectives(copy, f"{type(copy).__name__}.{self._step_name}")
        eager = torch.compiler.set_stance("force_eager")
        with alone, eager, self._context() if self._context is not None else nullcontext():
            return step(tree.map_all_tensors(Tensor.clone, batch), *self._arguments)


def _note(logged: dict[tuple[str, int], tuple[Any, Any]], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log``: note a number or tensor; metrics put themselves together."""
    if isinstance(value, (int, float, Tensor)) and (not isinstance(value, Tensor) or value.numel() == 1):
        nth = sum(1 for known, _ in logged if known == name)
        reduce_fx = log_arguments(name, value, *args, **kwargs).get("reduce_fx", "mean")
        logged[name, nth] = torch.as_tensor(value).detach().double().reshape(()), reduce_fx


def _gradients(copy: pl.LightningModule, loss: Tensor) -> list[Tensor]:
    """The gradients of small parameters, so many that they take little memory; empty if there are none to be had."""
    chosen, elements = [], 0
    for parameter in sorted((p for p in copy.parameters() if p.requires_grad), key=lambda p: p.numel()):
        elements += parameter.numel()
        if elements > _GRADIENT_ELEMENTS:
            break
        chosen.append(parameter)
    if not chosen or not loss.requires_grad:
        return []
    try:
        found = torch.autograd.grad(loss, chosen, allow_unused=True)
    except RuntimeError:  # reentrant checkpointing, which the run refuses itself
        return []
    parts = [dtensor.local_part(gradient) for gradient in found if gradient is not None]
    return [part.detach().double() for part in parts if part.layout is torch.strided]


def _knows_time(layer: nn.Module) -> bool:
    """Whether a layer takes sequences of samples and declares their order by ``batch_first``: torch's recurrent
    layers and attention do."""
    return isinstance(getattr(layer, "batch_first", None), bool)
