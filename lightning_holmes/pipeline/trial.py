"""Trial: runs of a step on copies of a module, without dropout, of which nothing stays: what they give is compared.

trial = Trial(module, "training_step", (0,), context=None)
(together,) = trial.outcome(trial.copy(), [small], seed=1)
first, second = trial.outcome(trial.copy(), halves, seed=1)      # in turn, on one copy
together.loss, together.gradients, together.logged, together.kept
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Placeholder, bytes_of
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.attributes import attribute_tensors, changes, name_of, snapshot, value_at
from lightning_holmes.pipeline.divisors import divisors_of
from lightning_holmes.pipeline.object_state import is_plain
from lightning_holmes.pipeline.replay import log_arguments
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.seeds import seed_all
from lightning_holmes.pipeline.shadow import shadow_copy
from lightning_holmes.pipeline.whole_steps import refusing_collectives
from lightning_holmes.torch_private import is_batch_norm, is_dropout, tensor_version

_GRADIENT_ELEMENTS = 1 << 20
Lengths = dict[str, tuple[int, int]]
"""By the name of a layer that declares ``batch_first``: the lengths (time, samples) of its first argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What runs of a step over some samples have given. ``loss``: 0 for a step that does not train.

    ``output``: what the step returned. ``gradients``: those of some small parameters. ``is_fp32``: whether no part is computed in 16 bits. ``logged``: by name and count of the call, the value and
    its ``reduce_fx``. ``divisors``: those of the loss. ``kept``: what has changed on the module, by path; only numbers, texts, tensors and containers of these.
    """

    loss: Tensor
    output: Any
    gradients: Sequence[Tensor] = ()
    is_fp32: bool = True
    logged: Mapping[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)
    divisors: Sequence[float] = ()
    kept: Mapping[str, Any] = field(default_factory=dict)


class Trial:
    """Runs a step on copies of a module, without dropout and with batch normalisation's running statistics.

    Attributes:
        may_fail: whether an exception of a run says something of the module; else it ends the trial.
    """

    may_fail = True

    def __init__(
        self, module: pl.LightningModule, step_name: str, arguments: tuple[Any, ...], context: Callable[[], Any] | None
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

    def anybody(self, flag: bool) -> bool:
        """Whether ``flag`` is true for one of those that try: all go the same way."""
        return flag

    def outcome(self, copy: pl.LightningModule, batches: Sequence[Any], seed: int) -> list[Outcome]:
        """The outcome of steps over ``batches`` in turn; what is kept on the copy is that after all of them."""
        found = []
        kept = Kept(copy)
        trains = self._step_name == "training_step"
        for batch in batches:
            calls: list[tuple[str, Any, Mapping[str, Any]]] = []
            vars(copy)["log"] = lambda *args, calls=calls, **kwargs: calls.append(_call(*args, **kwargs))
            with torch.set_grad_enabled(trains):
                output = self._run(copy, batch, seed)
                loss = loss_of(output, self._step_name) if trains else torch.zeros(())
                divisors = [float(value) for value in divisors_of(loss)]
                gradients = gradients_of(copy.parameters(), loss)
            found.append(
                Outcome(
                    loss=loss.detach().double(),
                    output=output,
                    gradients=gradients,
                    is_fp32=self._computes_in_fp32(copy),
                    logged=numbers_of(calls),
                    divisors=divisors,
                )
            )
        vars(copy)["log"] = lambda *_, **__: None
        return [*found[:-1], replace(found[-1], kept=kept.changed())]

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

    def lengths(self, batch: Any) -> Lengths:
        """By layer name, the lengths (time, samples) of the first tensor argument of layers with ``batch_first``."""
        found: Lengths = {}
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
            for name, value in vars(submodule).items():
                # attention and recurrent layers have a rate, and no layer for it
                if "dropout" in name and isinstance(value, float):
                    vars(submodule)[name] = 0.0
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


def _call(name: str, value: Any, *args: Any, **kwargs: Any) -> tuple[str, Any, Mapping[str, Any]]:
    arguments = log_arguments(name, value, *args, **kwargs)
    return name, value.detach().clone() if isinstance(value, Tensor) else value, arguments


def numbers_of(calls: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> dict[tuple[str, int], tuple[Tensor, Any]]:
    """The numbers among the values of log calls, given by name, value and arguments: by name and count of the call, with their ``reduce_fx``;
    metrics put themselves together."""
    found: dict[tuple[str, int], tuple[Tensor, Any]] = {}
    for name, value, arguments in calls:
        if isinstance(value, (int, float, Tensor)) and (not isinstance(value, Tensor) or value.numel() == 1):
            nth = sum(1 for known, _ in found if known == name)
            found[name, nth] = torch.as_tensor(value).detach().double().reshape(()), arguments.get("reduce_fx", "mean")
    return found


class Kept:
    """What steps leave on a module, since this was made."""

    def __init__(self, copy: pl.LightningModule) -> None:
        self._copy = copy
        self._values = snapshot(copy)
        self._tensors = {p: (t, tensor_version(t), t.detach().clone()) for p, t in self._find_tensors().items()}

    def changed(self) -> dict[str, Any]:
        """The plain values and the tensors, but for buffers, the states of metrics and values of other stages, that have changed, by path."""
        copy, kept, tensors = self._copy, {}, {}
        for owner, path in changes(self._values, snapshot(copy)):
            value = value_at(copy, owner, path)
            is_here = not any(isinstance(tensor, Placeholder) for tensor in tree.tensors_of(value))
            if is_here and is_plain(value) and not isinstance(copy.get_submodule(owner), Metric):
                kept[name_of(owner, *path)] = value
        for path, tensor in self._find_tensors().items():
            before, version, was = self._tensors.get(path, (None, 0, tensor))
            attribute, _, number = path.rpartition(".")
            is_same = before is tensor and version == tensor_version(tensor) and _has_same_values(tensor, was)
            if attribute not in kept and not is_same:
                tensors[attribute if number == "0" else path] = tensor.detach().clone()
        return kept | tensors

    def _find_tensors(self) -> dict[str, Tensor]:
        metrics = tuple(f"{name}." for name, part in self._copy.named_modules() if isinstance(part, Metric))
        found = attribute_tensors(self._copy).items()
        return {p: t for p, t in found if type(t) is Tensor and not p.startswith(metrics) and not t.is_inference()}


def _has_same_values(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor has kept its values: a write through ``.data`` moves no version."""
    is_comparable = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return not is_comparable or (tensor.shape == before.shape and torch.equal(bytes_of(tensor), bytes_of(before)))


def gradients_of(parameters: Iterable[nn.Parameter], loss: Tensor) -> list[Tensor]:
    """The gradients of small ones of ``parameters``, so many that they take little memory; empty if there are none to be had."""
    chosen, elements = [], 0
    for parameter in sorted((p for p in parameters if p.requires_grad), key=lambda p: p.numel()):
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
