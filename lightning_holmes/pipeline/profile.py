"""Profile a module: what each layer of a training step costs, counted without running it.

The result is a ModelCost (plan/layer_cost.py). plan/cost_model.py computes the time on a device from it.

    module = build_fake(lambda: GPT(hidden_size=8192, num_layers=48, ...))     # no weights are allocated
    cost = profile_step(module, (batch, 0))
    cost.layers[0].forward          # FLOPs of one microbatch

It runs one microbatch of the module's own step forward and backward on fake tensors (on the CPU, not meta: meta tensors
take other paths through many modules), and counts the FLOPs of matrix products, convolutions and attention, and the
bytes that all other operators read and write; a fixed time may be charged for each operator (operator_s). A step that
cannot run on fake tensors (because it reads values) is run once for real, and counted. A layer's backward begins, and
the backward of what follows it ends, when a gradient reaches the layer's output.

trace.py decides whether the step may be split at all. The module itself is not changed: copies run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.layers import NotTheLayersError, along_layers
from lightning_holmes.pipeline.shadow import replace_parameters, shadow_copy, with_own_gradients
from lightning_holmes.pipeline.step_recorder import Counts, StepRecorder
from lightning_holmes.pipeline.structure import BEFORE, ModuleStructure
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    attention_flop_formulas,
    computes,
    fake_mode_of,
)

_BACKWARD_OPERATORS = 2.0  # for each operator of the forward; dispatch does not see all of autograd's operators


class ReadsValuesError(UnsupportedModuleError):
    """A step cannot run on fake tensors, nor for real: it has no real weights, or may not be run."""


def build_fake(factory: Callable[[], pl.LightningModule]) -> pl.LightningModule:
    """Build the module that ``factory`` returns, with parameters and buffers that take no memory and hold no values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return factory()


def profile_step(
    module: pl.LightningModule,
    arguments: tuple[Any, ...],
    *,
    layers: str = "auto",
    structure: ModuleStructure | None = None,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    microbatch_samples: int | None = None,
    operator_s: float = 0.0,
    may_run: bool = True,
) -> ModelCost:
    """Profile ``module.training_step(*arguments)`` and return its costs.

    Args:
        arguments: the arguments of the step; the first one is a microbatch, real or fake.
        layers: the list to split along, as in the strategy; if ``structure`` is given, its list is used instead.
        structure: the result of tracing the module, if it was traced: where parameters are read, and forbidden split
            points. Without it, a parameter belongs to where its module is called.
        context: returns the context manager of a step (precision).
        microbatch_samples: the number of samples in the microbatch, if it cannot be read from the batch.
        operator_s: seconds that launching an operator takes, charged for each operator beside its FLOPs.
        may_run: whether a step that does not run on fake tensors may be run for real.

    Raises:
        UnsupportedModuleError: the step calls no list of layers once each and in order.
        ReadsValuesError: the step does not run on fake tensors, and has no real weights or may not be run for real.
    """
    samples = microbatch_samples or BatchSplitter().batch_size(arguments[0])
    name = structure.layers if structure is not None else layers
    seen = along_layers(
        module, "training_step", name, lambda name: _run(module, arguments, name, context or nullcontext, may_run)
    )
    return _model_cost(module, seen, structure, samples, _tokens(arguments[0]), operator_s)


def _run(
    module: pl.LightningModule,
    arguments: tuple[Any, ...],
    layers: str,
    context: Callable[[], AbstractContextManager[Any]],
    may_run: bool,
) -> StepRecorder:
    has_values = all(fake_mode_of(parameter) is None for parameter in module.parameters())
    fake = next((found for p in module.parameters() if (found := fake_mode_of(p)) is not None), None)
    fake = fake or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with nullcontext() if has_values else fake:  # under the mode, real tensors (a metric's state) cannot be copied
            shadow = _attached_copy(module)
        with fake:
            _make_fake(shadow, fake)
            given = tree.map_all_tensors(lambda tensor: _as_fake(tensor, fake), arguments)
            return _count(shadow, given, layers, context)
    except (NotTheLayersError, UnsupportedModuleError):
        raise
    except Exception as error:
        if not has_values or not may_run:
            lacks = "has no real weights to run it for real" if not has_values else "is not to be run for real for this"
            raise ReadsValuesError(
                f"{type(module).__name__}.training_step does not run on tensors without values "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}), and this module "
                f"{lacks}; profile a smaller one, or leave the value out of the step"
            ) from error
        return _count(
            with_own_gradients(_attached_copy(module)), tree.map_all_tensors(Tensor.clone, arguments), layers, context
        )


def _attached_copy(module: pl.LightningModule) -> pl.LightningModule:
    """A copy of the module that has the same trainer, if any, which its step may use."""
    shadow = shadow_copy(module)
    set_trainer(shadow, trainer_of(module))
    return shadow


def _count(
    shadow: pl.LightningModule,
    arguments: tuple[Any, ...],
    layers: str,
    context: Callable[[], AbstractContextManager[Any]],
) -> StepRecorder:
    formulas = FlopCounterMode(display=False, custom_mapping=attention_flop_formulas()).flop_registry
    with torch.compiler.set_stance("force_eager"), _OperatorCounter(formulas) as operators:  # see trace.py
        recorder = StepRecorder(shadow, layers, lambda: operators.counts)
        recorder.step(arguments, context)
    return recorder


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, FLOPs and moved bytes; ``formulas``: the FLOPs of matrix products, by operator.

    torch's FlopCounterMode counts the same, but asks for each operator whether it is composed of others, which takes
    a fifth of a plan's time: composite operators are already decomposed above the dispatch, except in inference mode.
    """

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas, self.counts = formulas, Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        formula = self.formulas.get(func.overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=found)
            self.counts += Counts(flops, 1, 1, 0, flops if torch.is_grad_enabled() else 0)
        elif computes(func):
            self.counts += Counts(0, 1, 0, _moved_bytes(func, (args, kwargs), found), 0)
        return found


def _moved_bytes(func: Any, given: Any, found: Any) -> float:
    """The bytes that an operator reads and writes: each tensor once, of an expanded one only its memory. A lookup
    reads and writes the rows, not the table; allocating memory or reading a value in Python moves nothing."""
    name = func.overloadpacket.__name__
    if name.startswith(("empty", "new_empty", "_unsafe_view", "_reshape_alias", "_local_scalar_dense")):
        return 0.0
    written = math.fsum(_bytes_of(tensor) for tensor in tree.tensors_of(found))
    if name in ("embedding", "index_select", "gather"):
        return 2 * written
    return written + math.fsum(_bytes_of(tensor) for tensor in tree.tensors_of(given))


def _bytes_of(tensor: Tensor) -> float:
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _make_fake(shadow: pl.LightningModule, mode: FakeTensorMode) -> None:
    """Replace the parameters and buffers of a copy by fake ones."""
    replace_parameters(shadow, lambda p: nn.Parameter(_as_fake(p.detach(), mode), requires_grad=p.requires_grad))
    for submodule in shadow.modules():
        for name, buffer in list(submodule.named_buffers(recurse=False)):
            setattr(submodule, name, _as_fake(buffer, mode))


def _as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return tensor if fake_mode_of(tensor) is not None else mode.from_tensor(tensor)


def _model_cost(
    module: pl.LightningModule,
    seen: StepRecorder,
    structure: ModuleStructure | None,
    samples: int,
    tokens_per_sample: int | None,
    operator_s: float,
) -> ModelCost:
    size = seen.num_layers
    weights, trained, shared = [0.0] * (size + 2), [0.0] * (size + 2), 0.0
    for name, parameter in module.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        positions = _positions(module, name, seen, structure)
        for position in positions:
            weights[position] += num_bytes
            trained[position] += num_bytes * parameter.requires_grad
        if len(positions) > 1:
            shared += num_bytes
    crossing = [*seen.crossing, 0.0]
    costs = [
        LayerCost(
            forward=seen.forward[position].flops,
            backward=seen.backward[position].flops,
            parameter_bytes=weights[position],
            gradient_bytes=trained[position],
            activation_bytes=crossing[position],
            held_bytes=seen.held[position],
            fixed_forward_s=seen.forward[position].operators * operator_s,
            # a layer without a backward is frozen
            fixed_backward_s=seen.forward[position].operators
            * operator_s
            * _BACKWARD_OPERATORS
            * (seen.backward[position].flops > 0),
            forward_products=seen.forward[position].products,
            backward_products=seen.backward[position].products,
            forward_moved_bytes=seen.forward[position].moved_bytes,
            backward_moved_bytes=seen.backward[position].moved_bytes,
            recomputed=seen.backward[position].watched_flops,
            undivided_bytes=None if 0 < position <= size else seen.held[position],
        )
        for position in range(size + 2)
    ]
    forbidden: tuple[int, ...] = ()
    sizes = [(p.numel(), p.element_size()) for p in module.parameters() if p.requires_grad] or [(1, 4)]
    if structure is not None:
        forbidden = tuple(structure.forbidden_cuts())
    return ModelCost(
        microbatch_samples=samples,
        before=costs[0],
        layers=tuple(costs[1:-1]),
        after=costs[-1],
        shared_bytes=shared,
        forbidden_cuts=forbidden,
        tokens_per_sample=tokens_per_sample,
        parameter_itemsize=sum(number * size for number, size in sizes) / sum(number for number, _ in sizes),
        activation_itemsize=sum(seen.crossing) / seen.crossing_elements if seen.crossing_elements else 4.0,
        num_parameters=sum(p.numel() for p in module.parameters()),
        layer_list=seen.layers,
        name=type(module).__name__,
    )


def _positions(module: nn.Module, name: str, seen: StepRecorder, structure: ModuleStructure | None) -> set[int]:
    """The positions where a parameter is used: 0 before the layers, i + 1 in layer i, and num_layers + 1 after them."""
    size = seen.num_layers
    if structure is not None and structure.readers.get(name):
        # a value first read in layer 0 but owned by a module before it (an embedding) belongs before the layers
        before = (BEFORE,) if name.startswith(f"{seen.layers}.") else (BEFORE, 0)
        return {0 if position in before else position + 1 for position in structure.readers[name]}
    if name.startswith(f"{seen.layers}."):
        return {1 + seen.calls.names.index(name[len(seen.layers) + 1 :].split(".")[0])}
    parameter = module.get_parameter(name)
    found: set[int] = set()
    for owner, submodule in module.named_modules():
        if any(own is parameter for own in submodule.parameters(recurse=False)):
            found |= {0 if position == 0 else min(position, size + 1) for position in seen.called_at.get(owner, ())}
    return found or {0}


def _tokens(batch: Any) -> int | None:
    """The number of tokens of a sample if the batch has a 2-D integer tensor of shape (samples, tokens); else None."""
    for tensor in tree.tensors_of(batch):
        if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            return int(tensor.shape[1])
    return None
