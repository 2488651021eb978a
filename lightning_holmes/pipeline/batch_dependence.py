"""Find steps whose results depend on which samples are in a batch together: microbatches cannot give the same numbers.

Batch normalisation, negatives taken from the batch, means over tokens with padding: no splitting is exact for these,
in any library. They are found by a trial without dropout on copies of the module: the loss of a few samples together
is compared with the weighted mean of the losses of their halves, and so are its gradients, since two losses may be
alike by chance, every value that is logged, and what the step leaves on the module. Buffers that every run of the step
changes (a spectral norm's vectors, running means) are found in the same way. So are batches whose first dimension is
time, not samples: layers that know which dimension is time (``batch_first``) show that its length changes with the split.

    findings = find_batch_dependence(module, "training_step", batch, (0,), splitter)
    findings.dependence.reason                  # dependence is None if nothing was found
    findings.merges["tokens"]                   # "sum": the whole batch's value is the sum of its parts'
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import (
    BatchSplitter,
    merge_outputs,
    microbatches_argument,
    splits_itself,
    weighted_mean,
)
from lightning_holmes.pipeline.divisors import are_shares
from lightning_holmes.pipeline.outside import Outside
from lightning_holmes.pipeline.own_generators import preserved_generators
from lightning_holmes.pipeline.replay import CURVED_MERGES, MERGES, merge_values, usual_merge
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.trial import Lengths, Outcome, Trial
from lightning_holmes.torch_private import is_batch_norm

SAMPLES = 4
_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE_16 = 1e-3, 5e-2
"""Of the norm of gradients, in fp32 and in 16 bits, whose matrix products are rounded differently for other batch sizes."""
_ROUNDING = 1e-6
"""Of means in fp32."""
_SAME = 1e-6
"""Relative difference between two runs over the same samples from which on a step draws random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDependence:
    """The dependence that was found. reason: in whole sentences. cause: in a few words."""

    reason: str
    cause: str
    is_cut_along_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a trial has found.

    Attributes:
        merges: how the parts of logged values are put together where that is not the usual way, or as it was known (replay.MERGES).
        divisors: for each number by which the loss divides (divisors.py), whether parts of a batch had their shares of it.
        samples: how many samples were tried together.
    """

    dependence: BatchDependence | None = None
    merges: Mapping[str, str] = field(default_factory=dict)
    divisors: Sequence[bool] = ()
    samples: int = SAMPLES


def find_batch_dependence(
    module: pl.LightningModule,
    step_name: str,
    batch: Any,
    arguments: tuple[Any, ...],
    splitter: BatchSplitter,
    *,
    context: Callable[[], Any] | None = None,
    trial: Trial | None = None,
    known: Mapping[str, str] | None = None,
    samples: int = SAMPLES,
) -> Findings:
    """Find why splitting a batch changes the results of a step of ``module``; None if no dependence is found.

    The loss of a step that draws random numbers other than for dropout (noise, time steps) cannot be judged.

    Args:
        trial: runs the steps; None: one on this process, which has the whole module.
        known: how the parts of logged values are put together, as far as an earlier trial has found.
        samples: how many samples to try together; all of the batch where the step fails over so few.
    """
    trial = trial or Trial(module, step_name, arguments, context)
    find = functools.partial(_find, module, step_name, batch, splitter, trial, known or {})
    try:
        return find(samples)
    except Exception:
        if not trial.may_fail:
            raise
        return find(sys.maxsize)


def _find(
    module: pl.LightningModule,
    step_name: str,
    batch: Any,
    splitter: BatchSplitter,
    trial: Trial,
    known: Mapping[str, str],
    samples: int,
) -> Findings:
    trains = step_name == "training_step"
    name = type(module).__name__
    norms = [n for n, m in module.named_modules() if is_batch_norm(m) and m.training] if trains else []
    parts = _parts(module, batch, splitter, samples)
    if trial.anybody(parts is None):
        parts = None
    found, moved = _Differences(), []
    if parts is not None:
        small, halves, weights = parts
        with preserved_random_state(trial.device_of(small)), preserved_generators(module), Outside(module).preserved():
            if not splits_itself(module):
                time = _read_as_time(trial.lengths(small), trial.lengths(halves[0]))
                if time is not None:
                    return Findings(dependence=_cut_along_time(name, step_name, time))
            if not trains or all(m.track_running_stats for m in module.modules() if is_batch_norm(m)):
                found = _find_differences(trial, small, halves, weights, known)
                if found.undecided and trial.may_fail:
                    found.merges.update(_decide(module, trial, small, splitter))
            moved = [] if found.failure else _moved_buffers(trial, small, halves)
    one = f"{microbatches_argument(step_name)}=1"
    reasons: dict[str, str] = {}  # by cause
    if norms:
        shown = _some(norms)
        reasons[f"batch normalisation ({shown}) takes its statistics from it"] = (
            f"{name} has batch normalisation ({shown}): its statistics run over a microbatch, so results equal those of "
            f"plain Lightning with the microbatch as batch, not with the whole batch; GroupNorm and LayerNorm are exact"
        )
    if found.failure:
        reasons[f"the step fails over a part of it ({found.failure})"] = (
            f"{step_name} of {name} runs over samples of a batch and fails over a half of them ({found.failure}): with several microbatches it "
            f"runs over parts of a batch; define `split_batch(self, batch, num_microbatches) -> list`, or use {one}"
        )
    if found.loss is not None:
        together, apart = found.loss
        reasons["the loss depends on which samples are in it"] = (
            f"the loss of {name} over samples of a batch is {together:.6g}, the mean over their halves "
            f"{apart:.6g}: it depends on which samples are together, as with negatives taken from the batch or a mean "
            f"over tokens with padding. Microbatches then give the numbers of plain Lightning with the microbatch as batch; "
            f"for a mean over tokens define `microbatch_weight(self, batch)`, the number of tokens, or use {one}"
        )
    elif found.gradient:
        reasons["the gradients depend on which samples are in it"] = (
            f"the gradients of {name} over samples of a batch and the mean of those over their halves are {found.gradient:.1%} apart: they depend "
            f"on which samples are together, as with a mean over tokens with padding, where `microbatch_weight(self, batch)` may return "
            f"the number of tokens; or use {one}"
        )
    if found.is_uneven:
        reasons["the loss is a mean over elements of which not each sample has as many"] = (
            f"the loss of {name} is a mean over elements (targets that are not ignored, a mask) of which not each sample has as many: "
            f"it depends on which samples are together; define `microbatch_weight(self, batch)`, the number of elements, or use "
            f"{one}"
        )
    if found.logged:
        reasons[f"what it logs as {_some(found.logged)} is no mean over its parts"] = (
            f"what {step_name} of {name} logs as {_some(found.logged)} is no mean, sum, least or greatest value over the parts of a batch: "
            f"with several microbatches it is the mean over them; log a torchmetrics.Metric, or use {one}"
        )
    if found.output and found.loss is None:
        cause = "the step's output cannot be put together from its parts"
        reasons[cause] = f"{step_name} of {name}: {found.output}; {one} returns what plain Lightning does"
    if found.kept and trains:  # of evaluation steps the trace tells
        reasons[f"the step leaves self.{_some(found.kept)} on the module"] = (
            f"{step_name} of {name} leaves self.{_some(found.kept)} on the module, once for each microbatch: it is that of the last one, or "
            f"counts each of them; {one} leaves what plain Lightning does"
        )
    if found.is_carried and not found.kept:
        reasons["a part of it changes the results of the next part"] = (
            f"{step_name} of {name} leaves state behind, in a buffer for one, that changes the results of the samples which come next: of "
            f"several microbatches the later ones read what the first has left, of a batch at once none does; use {one}"
        )
    if moved:
        shown = _some(moved)
        reasons[f"each run of the step changes buffers ({shown})"] = (
            f"{step_name} of {name} changes buffers ({shown}) each time it runs, which is once for each microbatch: with several of "
            f"them they, and what is computed from them, are other than those of plain Lightning with the whole batch"
        )
    dependence = BatchDependence(reason="; ".join(reasons.values()), cause=", and ".join(reasons)) if reasons else None
    return Findings(dependence=dependence, merges=found.merges, divisors=found.divisors, samples=samples)


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _parts(
    module: pl.LightningModule, batch: Any, splitter: BatchSplitter, samples: int
) -> tuple[Any, list[Any], list[float]] | None:
    """A few samples (the whole batch if the module has ``split_batch``), their halves, and the weights of the halves;
    None if the batch cannot be split like this."""
    try:
        small = batch
        if not splits_itself(module):
            if splitter.batch_size(batch) < 2:
                return None
            small = splitter.spread(batch, samples)
        halves = splitter.split(small, 2, module)
        return small, halves, splitter.weights(halves, module)
    except (ConfigurationError, UnsupportedModuleError):  # the run itself reports the reason
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """Where a step over samples together and steps over their halves differ."""

    loss: tuple[float, float] | None = None
    gradient: float = 0.0
    logged: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    output: str = ""
    merges: dict[str, str] = field(default_factory=dict)
    undecided: bool = False
    """Whether a logged value is the same in all parts, as a greatest value may be, so that several ways give that of the whole."""
    divisors: Sequence[bool] = ()
    is_uneven: bool = False
    """Whether a loss that cannot be judged, since each run gives another, divides by numbers of which the parts have not their shares."""
    failure: str = ""
    """Why the step fails over a half, where it does not over the samples together."""
    is_carried: bool = False
    """Whether what the step over one half leaves behind, and nothing else, gives the other half other results."""

    @property
    def are_results(self) -> bool:
        return self.loss is not None or bool(self.gradient or self.logged or self.output)

    @property
    def are_any(self) -> bool:
        return self.are_results or bool(self.kept)


def _find_differences(
    trial: Trial, small: Any, halves: list[Any], weights: list[float], known: Mapping[str, str]
) -> _Differences:
    """Compare a step over the samples together with steps over their halves.

    Copying the module takes longer than such a step, so at first there are two copies: one for the samples together, and one for the halves in
    turn, as in a run with two microbatches. If something then differs, or a step fails, the reason may be chance, or state that an earlier step
    has left: a second run shows what differs from run to run and cannot be judged, and all but what is kept is that of a copy for each half.
    """
    together = trial.outcome(trial.copy(), [small], 1)[0]
    if trial.anybody(not together.loss.isfinite().all()):
        return _Differences()
    try:
        in_turn = trial.outcome(trial.copy(), halves, 1)
        found = _compare(together, in_turn, weights, known)
        if not trial.anybody(found.are_any):
            return found
        kept, is_carried = found.kept, found.are_results
    except Exception:
        if not trial.may_fail:
            raise
        kept, is_carried = [], True
    again = trial.outcome(trial.copy(), [small], 2)[0]
    try:
        apart = [trial.outcome(trial.copy(), [half], 1)[0] for half in halves]
    except UnsupportedModuleError:
        raise
    except Exception as error:
        if not trial.may_fail:
            raise
        return _Differences(failure=one_line(error))
    found, chance = _compare(together, apart, weights, known), _compare(together, [again], [1.0], {}, _SAME)
    return replace(
        found,
        loss=None if chance.loss is not None else found.loss,
        gradient=0.0 if chance.loss is not None or chance.gradient else found.gradient,
        logged=[name for name in found.logged if name not in chance.logged],
        output="" if chance.output else found.output,
        kept=[name for name in kept if name not in chance.kept],
        is_uneven=chance.loss is not None and not all(found.divisors),
        is_carried=is_carried and not (found.are_results or chance.are_results),
    )


def _compare(
    together: Outcome,
    parts: Sequence[Outcome],
    weights: Sequence[float],
    known: Mapping[str, str],
    tolerance: float = _TOLERANCE,
) -> _Differences:
    apart = weighted_mean([part.loss for part in parts], weights)
    logged, merges, undecided = _compare_logged(together, parts, weights, known, tolerance)
    last = parts[-1].kept
    return _Differences(
        loss=None if _agree(together.loss, apart, tolerance) else (together.loss.item(), apart.item()),
        gradient=_gradient_difference(together, parts, weights),
        logged=logged,
        kept=[name for name, value in together.kept.items() if name not in last or not _alike(value, last[name])],
        output=_compare_output(together, parts, weights, tolerance),
        merges=merges,
        undecided=undecided,
        divisors=_compare_divisors(together, parts, weights),
    )


def _compare_output(together: Outcome, parts: Sequence[Outcome], weights: Sequence[float], tolerance: float) -> str:
    """Why the step's output cannot be put together from its parts, or a number in it is no mean over them; "" if neither is so."""
    sizes = [round(weight) for weight in weights]
    if not all(bool(part.loss.isfinite()) for part in parts):
        return ""  # the loss tells
    try:
        merged = merge_outputs([part.output for part in parts], sizes, list(weights), "what it returns")
    except UnsupportedModuleError as reason:
        return str(reason)
    if not _alike(*(tree.map_tensors(lambda _: None, output) for output in (together.output, merged))):
        return "a number or text that it returns is not that of the parts of a batch put together"
    pairs = list(zip(tree.tensors_of(together.output), tree.tensors_of(merged), strict=False))
    if any(one.shape != other.shape for one, other in pairs):
        return "a tensor that it returns cannot be put together from those of the parts of a batch, as one entry a sample can"
    curved_merges = _CurvedMerges(together, parts, weights)
    for (whole, mean), *values in zip(pairs, *(tree.tensors_of(part.output) for part in parts), strict=False):
        values, one = [value.detach().double() for value in values], whole.detach().double()
        if one.ndim == 0 and (not _agree(one, mean.detach().double(), tolerance) or curved_merges.find(one, values)):
            return "a number that it returns is no mean over the parts of a batch"
    return ""


def _agree(together: Tensor, apart: Tensor, tolerance: float) -> bool:
    return _distance(together, apart) <= tolerance


def _distance(together: Tensor, apart: Tensor) -> float:
    """Relative; 0 where both are the same, also if that is no number, and infinite where only one is a number."""
    if torch.allclose(together, apart, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    return float(((apart - together).abs().max() / together.abs().max().clamp_min(1e-12)).nan_to_num(torch.inf))


def _gradient_difference(together: Outcome, parts: Sequence[Outcome], weights: Sequence[float]) -> float:
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
    return found if found > (_GRADIENT_TOLERANCE if together.is_fp32 else _GRADIENT_TOLERANCE_16) else 0.0


def _compare_logged(
    together: Outcome, parts: Sequence[Outcome], weights: Sequence[float], known: Mapping[str, str], tolerance: float
) -> tuple[list[str], dict[str, str], bool]:
    """The names of logged values that no way of putting their parts together gives, that way for those where it is not the usual one, and whether
    it is not known for some."""
    differing, merges, undecided = [], {}, False
    curved_merges = _CurvedMerges(together, parts, weights)
    for (name, nth), (value, reduce_fx) in together.logged.items():
        found = [part.logged.get((name, nth)) for part in parts]
        values = [entry[0] for entry in found if entry is not None]
        if len(values) < len(parts):
            continue  # logged in some parts only
        usual = known.get(name) or usual_merge(reduce_fx)
        fitting = [
            way
            for way in dict.fromkeys((usual, *MERGES))
            if _distance(value, merge_values(way, values, weights)) <= tolerance
        ]
        if usual == "mean" and (curved := curved_merges.find(value, values)):
            fitting = [curved]
        if not fitting:
            differing.append(name)
        elif fitting[0] != usual:
            merges[name] = fitting[0]
        undecided = undecided or len(fitting) > 1
    return list(dict.fromkeys(differing)), merges, undecided


class _CurvedMerges:
    """Tells values that are functions of a mean, one of CURVED_MERGES, from means: halves are often so alike that the mean, too, is within
    the tolerance."""

    def __init__(self, together: Outcome, parts: Sequence[Outcome], weights: Sequence[float]) -> None:
        self._weights = weights
        self._losses = [outcome.loss for outcome in (together, *parts)]
        rounding = _distance(together.loss, weighted_mean(self._losses[1:], weights))  # the loss is a mean
        self._rounding = max(rounding, _ROUNDING if together.is_fp32 else _TOLERANCE)

    def find(self, together: Tensor, values: Sequence[Tensor]) -> str:
        """The way for values that are the exponential of the loss, or its root; else that which gives the value of samples together, where
        each other one is clearly farther from it than rounding is; else "", as for one part."""
        if len(values) == 1:
            return ""
        pairs = list(zip((together, *values), self._losses, strict=True))
        # 0 and 1 are their own roots
        if all(loss != 0 and not _agree(value, loss, _ROUNDING) for value, loss in pairs):
            for way, function in (("geometric", torch.exp), ("quadratic", torch.sqrt)):
                if all(_agree(value, function(loss), _ROUNDING) for value, loss in pairs):
                    return way
        ways = (*CURVED_MERGES, *MERGES)
        off = {way: _distance(together, merge_values(way, values, self._weights)) for way in ways}
        (way, nearest), (_, second), *_ = sorted(off.items(), key=lambda item: item[1])
        is_clear = nearest <= _TOLERANCE and second > 8 * max(nearest, self._rounding)
        return way if way in CURVED_MERGES and is_clear else ""


def _decide(module: pl.LightningModule, trial: Trial, small: Any, splitter: BatchSplitter) -> dict[str, str]:
    """How logged values are put together that the halves did not tell, by runs of one sample each: these are rarely alike, too."""
    if splits_itself(module):
        return {}
    try:
        singles = splitter.split(small, splitter.batch_size(small))
        together = trial.outcome(trial.copy(), [small], 1)[0]
        outcomes = trial.outcome(trial.copy(), singles, 1)
    except Exception:
        return {}  # the step may need several samples
    return _compare_logged(together, outcomes, splitter.weights(singles, module, [1] * len(singles)), {}, _TOLERANCE)[1]


def _compare_divisors(together: Outcome, parts: Sequence[Outcome], weights: Sequence[float]) -> list[bool]:
    outcomes = (together, *parts)
    if len({len(outcome.divisors) for outcome in outcomes}) > 1:  # one for each sample
        return []
    shares = (sum(weights), *weights)
    return [are_shares(values, shares) for values in zip(*(outcome.divisors for outcome in outcomes), strict=True)]


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


def _moved_buffers(trial: Trial, small: Any, halves: list[Any]) -> list[str]:
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


def _read_as_time(lengths: Lengths, shorter: Lengths) -> str | None:
    """The name of a layer for which the dimension that was split is time; None if there is none."""
    for name, (time, samples) in lengths.items():
        other_time, other_samples = shorter.get(name, (time, samples))
        if time != other_time and samples == other_samples:
            return name
    return None
