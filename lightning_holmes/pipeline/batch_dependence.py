"""Find steps whose results depend on which samples are in a batch together: microbatches cannot give the same numbers.

Batch normalisation, negatives taken from the batch, means over tokens with padding: no splitting is exact for these,
in any library. They are found by a trial without dropout on copies of the module: the loss of a few samples together
is compared with the weighted mean of the losses of their halves. Buffers that every run of the step changes (a
spectral norm's vectors, running means) are found in the same way. So are batches whose first dimension is time, not
samples: layers that know which dimension is time (``batch_first``) show that its length changes with the split.

    found = find_batch_dependence(module, "training_step", batch, (0,), splitter)
    found.reason, found.is_cut_along_time                     # or None: nothing was found
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter, weighted_mean
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.seeds import preserved_random_state, seed_all
from lightning_holmes.pipeline.shadow import shadow_copy
from lightning_holmes.pipeline.whole_steps import refusing_collectives
from lightning_holmes.torch_private import is_batch_norm, is_dropout

_SAMPLES = 4
_TOLERANCE = 1e-4
_Lengths = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDependence:
    """The dependence that was found. reason: in whole sentences. cause: in a few words."""

    reason: str
    cause: str
    is_cut_along_time: bool = False


def find_batch_dependence(
    module: LightningModule,
    step_name: str,
    batch: Any,
    arguments: tuple[Any, ...],
    splitter: BatchSplitter,
    *,
    context: Callable[[], Any] | None = None,
) -> BatchDependence | None:
    """Find why splitting a batch changes the results of a step of ``module``; None if no dependence is found.

    The loss of a step that draws random numbers other than for dropout (noise, time steps) cannot be judged.
    """
    trains = step_name == "training_step"
    name = type(module).__name__
    norms = [n for n, m in module.named_modules() if is_batch_norm(m) and m.training] if trains else []
    trial = _Trial(module, step_name, arguments, context)
    parts = _parts(module, batch, splitter)
    loss, moved = None, []
    if parts is not None:
        small, halves, weights = parts
        with preserved_random_state(trial.device_of(small)):
            if not callable(getattr(module, "split_batch", None)):
                time = _read_as_time(trial.lengths(small), trial.lengths(halves[0]))
                if time is not None:
                    return _cut_along_time(name, step_name, time)
            if trains and all(m.track_running_stats for m in module.modules() if is_batch_norm(m)):
                loss = _losses(trial, small, halves, weights)
            moved = _moved_buffers(trial, small, halves)
    reasons, causes = [], []
    if norms:
        shown = _some(norms)
        reasons.append(
            f"{name} has batch normalisation ({shown}): its statistics run over a microbatch, so results equal those of "
            f"plain Lightning with the microbatch as batch, not with the whole batch; GroupNorm and LayerNorm are exact"
        )
        causes.append(f"batch normalisation ({shown}) takes its statistics from it")
    if loss is not None:
        together, apart = loss
        reasons.append(
            f"the loss of {name} over a few samples is {together:.6g}, the mean over their halves "
            f"{apart:.6g}: it depends on which samples are together, as with negatives taken from the batch or a mean "
            f"over tokens with padding. Microbatches then give the numbers of plain Lightning with the microbatch as batch; "
            f"for a mean over tokens define `microbatch_weight(self, batch)`, the number of tokens, or use num_microbatches=1"
        )
        causes.append("the loss depends on which samples are in it")
    if moved:
        shown = _some(moved)
        reasons.append(
            f"{step_name} of {name} changes buffers ({shown}) each time it runs, which is once for each microbatch: with several of "
            f"them they, and what is computed from them, are other than those of plain Lightning with the whole batch"
        )
        causes.append(f"each run of the step changes buffers ({shown})")
    return BatchDependence(reason="; ".join(reasons), cause=", and ".join(causes)) if reasons else None


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _parts(module: LightningModule, batch: Any, splitter: BatchSplitter) -> tuple[Any, list[Any], list[float]] | None:
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
    return small, halves, weights


def _losses(trial: "_Trial", small: Any, halves: list[Any], weights: list[float]) -> tuple[float, float] | None:
    """The loss over the samples together and over their halves; None if they agree or cannot be judged.

    Copying the module takes longer than such a step, so at first there are two copies: one for the samples together,
    and one for the halves in turn, as in a run with two microbatches. If the losses then differ, or a step fails, the
    reason may be state that an earlier step has left: the trial is repeated with a copy for each step.
    """
    with contextlib.suppress(Exception):
        shared = (copy for times in (2, len(halves)) for copy in itertools.repeat(trial.copy(), times))
        found = _together_and_apart(trial, shared, small, halves, weights)
        if found is not None and _agree(*found):
            return None
    own = (trial.copy() for _ in range(2 + len(halves)))
    found = _together_and_apart(trial, own, small, halves, weights)
    return None if found is None or _agree(*found) else (float(found[0]), float(found[1]))


def _together_and_apart(
    trial: "_Trial", copies: Iterator[LightningModule], small: Any, halves: list[Any], weights: list[float]
) -> tuple[Tensor, Tensor] | None:
    """The losses, with each step on the next of ``copies``; None if the loss over the same samples differs between
    two seeds, or is not finite."""
    together, again = (trial.loss(next(copies), small, seed) for seed in (1, 2))
    if not torch.equal(together, again) or not bool(together.isfinite().all()):
        return None
    return together, weighted_mean([trial.loss(next(copies), half, 1) for half in halves], weights)


def _agree(together: Tensor, apart: Tensor) -> bool:
    return float((apart - together).abs().max() / together.abs().max().clamp_min(1e-12)) <= _TOLERANCE


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
        module: LightningModule,
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

    def loss(self, copy: LightningModule, batch: Any, seed: int) -> Tensor:
        return loss_of(self._run(copy, batch, seed), self._step_name).double()

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
        self._run(copy, batch, 1)
        return found

    def copy(self) -> LightningModule:
        copy = shadow_copy(self._module)
        if self._step_name != "training_step":
            copy.eval()
        for submodule in copy.modules():
            if is_dropout(submodule) or is_batch_norm(submodule):
                submodule.eval()
        set_trainer(copy, trainer_of(self._module))
        vars(copy)["log"] = lambda *_, **__: None
        return copy

    def _run(self, copy: LightningModule, batch: Any, seed: int) -> Any:
        seed_all(seed, self.device_of(batch))
        step = getattr(copy, self._step_name)
        alone = refusing_collectives(copy, f"{type(copy).__name__}.{self._step_name}")
        with torch.no_grad(), alone, self._context() if self._context is not None else nullcontext():
            return step(tree.map_all_tensors(Tensor.clone, batch), *self._arguments)


def _knows_time(layer: nn.Module) -> bool:
    """Whether a layer takes sequences of samples and declares their order by ``batch_first``: torch's recurrent
    layers and attention do."""
    return isinstance(getattr(layer, "batch_first", None), bool)
