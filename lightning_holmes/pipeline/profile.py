"""Profiling a module: what each layer of a training step costs, without running it, or by a short measurement.

It gives a ModelCost (plan/layer_cost.py). What it costs on a device is for plan/cost_model.py.

    module = build_fake(lambda: GPT(hidden_size=8192, num_layers=48, ...))     # no weights are allocated
    cost = profile_step(module, (batch, 0))
    cost.layers[0].forward          # FLOPs of one microbatch

mode="fake" runs one microbatch of the module's own step forward and backward on fake tensors (on the CPU, not meta:
meta tensors take other paths through many modules), and counts the FLOPs of matrix products, convolutions and
attention; elementwise work is not counted, but each operator may be charged a fixed time (operator_s). Where the step
cannot run on them (it looks at values), it is run once for real, and counted. mode="measure" runs the real module on the
device where it is, a few times, and gives seconds. In both, a gradient that reaches a layer's output ends what lies behind it and begins the layer's backward.

Left to others: whether the step may be cut at all (trace.py). The module itself is not changed: copies run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.layers import candidate_layer_lists
from lightning_holmes.pipeline.repeats import undisturbed
from lightning_holmes.pipeline.shadow import replace_parameters, shadow_copy, share_layer_memory, with_own_gradients
from lightning_holmes.pipeline.structure import BEFORE, ModuleStructure
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    attention_flop_formulas,
    computes,
    fake_mode_of,
)

ProfileMode = Literal["fake", "measure"]
_REPEATS = 5
_MOST_REPEATS = 40
_ENOUGH_S = 5.0  # of repeats; then two are enough
_BACKWARD_OPERATORS = 2.0  # for each of the forward; those of autograd are not all seen by dispatch


class ReadsValuesError(UnsupportedModuleError):
    """A step runs neither on tensors without values nor, for want of weights or by its size, for real."""


def build_fake(factory: Callable[[], LightningModule]) -> LightningModule:
    """What factory makes, with parameters and buffers that take no memory and hold no values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return factory()


def profile_step(
    module: LightningModule,
    arguments: tuple[Any, ...],
    *,
    layers: str = "auto",
    structure: ModuleStructure | None = None,
    mode: ProfileMode = "fake",
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    microbatch_samples: int | None = None,
    operator_s: float = 0.0,
    may_run: bool = True,
    seconds: float = 0.0,
    pipeline_parallel_size: int = 1,
) -> ModelCost:
    """The costs of ``module.training_step(*arguments)``.

    Args:
        arguments: of the step; the first one is a microbatch, real or fake.
        layers: the list to cut along, as in the strategy; a structure's own is used where one is given.
        structure: what tracing the module found, if it was traced: where parameters are read, and forbidden cuts.
            Without it, a parameter belongs to where its module is called.
        mode: "fake" counts FLOPs, "measure" takes seconds.
        context: gives the context manager of a step (precision).
        microbatch_samples: samples in the microbatch, where the batch cannot tell.
        operator_s: seconds that every operator of a "fake" profile takes beside its FLOPs, in launching it.
        may_run: whether a step that does not run on fake tensors may be run for real.
        seconds: how long "measure" goes on at the least, after its first repeats.
        pipeline_parallel_size: into how many stages the layers will be cut. "measure" then works in the memory of one stage's
            layers: processors' caches hold more of few layers than of all.

    Raises:
        UnsupportedModuleError: the step runs through no list of layers in order.
        ReadsValuesError: it runs neither on fake tensors nor, having no real weights or not being allowed to, for real.
    """
    samples = microbatch_samples or BatchSplitter().batch_size(arguments[0])
    candidates = candidate_layer_lists(module, structure.layers if structure is not None else layers)
    reasons = []
    for candidate in candidates:
        try:
            seen = _run(module, arguments, candidate.name, mode, context, may_run, seconds, pipeline_parallel_size)
        except _NotTheLayers as reason:
            reasons.append(f"{candidate.name}: {reason}")
            continue
        return _model_cost(module, seen, structure, samples, mode, _tokens(arguments[0]), operator_s)
    raise UnsupportedModuleError(
        f"{type(module).__name__}.training_step calls no list of layers once each and in order ({'; '.join(reasons)}); "
        "name another list by layers="
    )


class _NotTheLayers(Exception):
    """The chosen list is not what the step runs through."""


def _run(
    module: LightningModule,
    arguments: tuple[Any, ...],
    layers: str,
    mode: ProfileMode,
    context: Callable[[], AbstractContextManager[Any]] | None,
    may_run: bool,
    seconds: float,
    pipeline_parallel_size: int,
) -> _Recorder:
    context = context or nullcontext
    has_values = all(fake_mode_of(parameter) is None for parameter in module.parameters())
    if mode == "measure":
        if not has_values:
            raise UnsupportedModuleError(
                f'{type(module).__name__} has no real weights, so profile="measure" cannot time it'
            )
        return _measure(module, arguments, layers, context, seconds, pipeline_parallel_size)
    fake = next((found for p in module.parameters() if (found := fake_mode_of(p)) is not None), None)
    fake = fake or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with nullcontext() if has_values else fake:  # under the mode, real tensors (a metric's state) cannot be copied
            shadow = shadow_copy(module)
        with fake:
            _make_fake(shadow, fake)
            given = tree.map_tensors(lambda tensor: _as_fake(tensor, fake), arguments)
            return _count(shadow, given, layers, context)
    except (_NotTheLayers, UnsupportedModuleError):
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
            with_own_gradients(shadow_copy(module)), tree.map_tensors(Tensor.clone, arguments), layers, context
        )


def _count(
    shadow: LightningModule, arguments: tuple[Any, ...], layers: str, context: Callable[[], AbstractContextManager[Any]]
) -> _Recorder:
    operators = _OperatorCounter()
    counting = FlopCounterMode(display=False, custom_mapping=attention_flop_formulas())
    with torch.compiler.set_stance("force_eager"), counting as counter, operators:  # see trace.py
        recorder = _Recorder(shadow, layers, lambda: float(counter.get_total_flops()), lambda: float(operators.number))
        recorder.step(arguments, context)
    return recorder


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += computes(func)
        return func(*args, **(kwargs or {}))


def _measure(
    module: LightningModule,
    arguments: tuple[Any, ...],
    layers: str,
    context: Callable[[], AbstractContextManager[Any]],
    seconds: float,
    pipeline_parallel_size: int,
) -> _Recorder:
    device = next(module.parameters()).device

    def wall_clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    # a host with a share of a core stops for longer than a layer takes, so where one thread computes, its own time tells the
    # layers apart, and the wall clock how long they take together
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else wall_clock
    # one copy for all repeats: gradients add up, as over microbatches. The first repeat also notes what is held
    shadow = with_own_gradients(shadow_copy(module))
    noted = _Recorder(shadow, layers, clock)
    share_layer_memory(shadow, layers, -(-len(noted.layer_list) // pipeline_parallel_size))
    noted.step(tree.map_tensors(Tensor.clone, arguments), context)
    recorders: list[_Recorder] = []
    recorded: list[float] = []  # seconds of each by the recorders' clock, and by the wall clock
    totals: list[float] = []
    start = time.perf_counter()
    while True:
        number, taken = len(recorders), time.perf_counter() - start
        if (number >= _REPEATS and taken >= seconds) or (number >= 2 and taken >= _ENOUGH_S) or number >= _MOST_REPEATS:
            break
        recorder = _Recorder(shadow, layers, clock)
        began = clock(), wall_clock()
        recorder.step(tree.map_tensors(Tensor.clone, arguments), context, bare=True)
        ended = clock(), wall_clock()
        recorders.append(recorder)
        recorded.append(math.fsum(recorder.forward) + math.fsum(recorder.backward))
        totals.append(recorded[-1] * (ended[1] - began[1]) / (ended[0] - began[0]))
    kept = undisturbed(totals)
    scale = math.fsum(totals[i] for i in kept) / math.fsum(recorded[i] for i in kept)
    for name in ("forward", "backward"):
        columns = zip(*(getattr(recorders[i], name) for i in kept), strict=True)
        setattr(noted, name, [scale * statistics.fmean(column) for column in columns])
    return noted


def _make_fake(shadow: LightningModule, mode: FakeTensorMode) -> None:
    """Fake parameters and buffers instead of a copy's own."""
    replace_parameters(shadow, lambda p: nn.Parameter(_as_fake(p.detach(), mode), requires_grad=p.requires_grad))
    for submodule in shadow.modules():
        for name, buffer in list(submodule.named_buffers(recurse=False)):
            setattr(submodule, name, _as_fake(buffer, mode))


def _as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return tensor if fake_mode_of(tensor) is not None else mode.from_tensor(tensor)


class _Recorder:
    """One step of a copy: readings of a clock (or counter of FLOPs) at each layer's beginning and end.

    forward, backward, held: one entry for what is before the layers, each layer, and after them.
    """

    def __init__(
        self,
        shadow: LightningModule,
        layers: str,
        clock: Callable[[], float],
        operators: Callable[[], float] | None = None,
    ) -> None:
        self.shadow, self.layers, self.clock = shadow, layers, clock
        self.count_operators = operators or (lambda: 0.0)
        self.layer_list = list(shadow.get_submodule(layers).children())
        size = len(self.layer_list)
        self.forward = [0.0] * (size + 2)
        self.backward = [0.0] * (size + 2)
        self.held = [0.0] * (size + 2)
        self.operators = [0.0] * (size + 2)  # of the forward
        self.crossing = [0.0] * (size + 1)  # bytes of the input of layer 0, and of each layer's output
        self.crossing_elements = 0
        self.called: list[int] = []
        self.called_at: dict[str, set[int]] = {}
        self.position = 0  # 0 before the layers, i + 1 in layer i and until the next, size + 1 after the last
        self.storages: dict[int, tuple[Any, int | None]] = {}
        self.reached: dict[int, float] = {}  # backward reached the output of position: the clock then
        self.last = 0.0
        self.last_operators = 0.0

    def step(
        self, arguments: tuple[Any, ...], context: Callable[[], AbstractContextManager[Any]], *, bare: bool = False
    ) -> None:
        """Run it, forward and backward; ``bare``: with nothing but the layers' ends noted, for the sake of a clock."""
        shadow = self.shadow
        # the copy's alone: nothing is logged from a profile
        for name in ("log", "log_dict"):
            object.__setattr__(shadow, name, lambda *args, **kwargs: None)
        shadow.train()
        places: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layer_list):
            places.setdefault(id(layer), []).append(index)
        gated = [(layer, vars(layer).get("forward")) for layer in {id(x): x for x in self.layer_list}.values()]
        for layer, _ in gated:
            layer.forward = self._gate(places[id(layer)], layer.forward)
        named = [] if bare else [(name, submodule) for name, submodule in shadow.named_modules() if name]
        handles = [submodule.register_forward_pre_hook(self._note(name)) for name, submodule in named]
        for parameter in shadow.parameters():
            self._own(parameter, None)
        try:
            with torch.enable_grad(), ExitStack() as stack:
                if not bare:
                    keep = torch.autograd.graph.saved_tensors_hooks(self._hold, lambda tensor: tensor)
                    stack.enter_context(keep)
                stack.enter_context(context())
                self.last = self.clock()
                output = shadow.training_step(*arguments)
                self._mark()
            if self.called != list(range(len(self.layer_list))):
                raise _NotTheLayers(f"called in the order {self.called[:8]}")
            self._run_backward(output)
        finally:
            for handle in handles:
                handle.remove()
            for layer, own in gated:
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def _run_backward(self, output: Any) -> None:
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UnsupportedModuleError(
                f"{type(self.shadow).__name__}.training_step returned no loss with a gradient on the profiled microbatch"
            )
        began = self.clock()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        end = self.clock()
        for position in range(len(self.layer_list) + 1, -1, -1):
            # where no gradient came by, all that was left ran here: nothing before it trains
            reached = self.reached.get(position - 1, end)
            self.backward[position] = reached - began
            if position - 1 not in self.reached:
                break
            began = reached

    def _mark(self) -> None:
        now, operators = self.clock(), self.count_operators()
        self.forward[self.position] += now - self.last
        self.operators[self.position] += operators - self.last_operators
        self.last, self.last_operators = now, operators

    def _note(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.called_at.setdefault(name, set()).add(self.position)

        return hook

    def _hold(self, tensor: Tensor) -> Tensor:
        self._own(tensor, self.position)
        return tensor

    def _own(self, tensor: Tensor, position: int | None, *, move: bool = False) -> None:
        """Count a tensor's memory once, as held by this position or (None) by nobody."""
        storage = tensor.untyped_storage()
        owner = self.storages.get(id(storage))
        if owner is not None and not move:
            return
        if owner is not None and owner[1] is not None:
            self.held[owner[1]] -= storage.nbytes()
        self.storages[id(storage)] = (storage, position)  # kept: an id is of a living object
        if position is not None:
            self.held[position] += storage.nbytes()

    def _gate(self, places: Sequence[int], forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(*args: Any, **kwargs: Any) -> Any:
            expected = len(self.called)
            if expected not in places:
                raise _NotTheLayers(f"layer {places[0]} is called where layer {expected} would follow")
            self._mark()
            for tensor in tree.tensors_of((args, kwargs)):
                # masks and rotary angles are shared by all layers; the hidden state is held by who receives it
                self._own(tensor, expected + 1 if tensor.requires_grad else 0, move=tensor.requires_grad)
            self.called.append(expected)
            if expected == 0:
                self.crossing[0] = self._reach(0, (args, kwargs))
                self._mark()
            self.position = expected + 1
            output = forward(*args, **kwargs)
            self._mark()
            self.crossing[expected + 1] = self._reach(expected + 1, output)
            if expected == len(self.layer_list) - 1:
                self.position = len(self.layer_list) + 1
            self.last = self.clock()
            return output

        return gate

    def _reach(self, position: int, value: Any) -> float:
        """Take down when backward reaches these tensors; their bytes, of those that need a gradient or all."""
        tensors = tree.tensors_of(value)
        wanting = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in wanting:

            def reached(gradient: Tensor) -> None:
                self.reached[position] = max(self.clock(), self.reached.get(position, 0.0))

            tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        self.crossing_elements += sum(tensor.numel() for tensor in (wanting or tensors))
        return float(sum(tensor.numel() * tensor.element_size() for tensor in (wanting or tensors)))


def _model_cost(
    module: LightningModule,
    seen: _Recorder,
    structure: ModuleStructure | None,
    samples: int,
    mode: ProfileMode,
    tokens_per_sample: int | None,
    operator_s: float,
) -> ModelCost:
    size = len(seen.layer_list)
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
            forward=seen.forward[position],
            backward=seen.backward[position],
            parameter_bytes=weights[position],
            gradient_bytes=trained[position],
            activation_bytes=crossing[position],
            held_bytes=seen.held[position],
            fixed_forward_s=seen.operators[position] * operator_s,
            # a layer without a backward is frozen
            fixed_backward_s=seen.operators[position]
            * operator_s
            * _BACKWARD_OPERATORS
            * (seen.backward[position] > 0),
        )
        for position in range(size + 2)
    ]
    forbidden: tuple[int, ...] = ()
    sizes = [(p.numel(), p.element_size()) for p in module.parameters() if p.requires_grad] or [(1, 4)]
    if structure is not None:
        forbidden = tuple(cut for cut in range(size - 1) if any(b.forbids(cut) for b in structure.bypasses))
    return ModelCost(
        unit="flops" if mode == "fake" else "seconds",
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


def _positions(module: nn.Module, name: str, seen: _Recorder, structure: ModuleStructure | None) -> set[int]:
    """Where a parameter is used: 0 before the layers, i + 1 in layer i, the last number after them."""
    size = len(seen.layer_list)
    if structure is not None and structure.readers.get(name):
        # a value first read in layer 0 but owned by a module before it (an embedding) belongs before the layers
        before = (BEFORE,) if name.startswith(f"{seen.layers}.") else (BEFORE, 0)
        return {0 if position in before else position + 1 for position in structure.readers[name]}
    if name.startswith(f"{seen.layers}."):
        names = [child for child, _ in module.get_submodule(seen.layers).named_children()]
        return {1 + names.index(name[len(seen.layers) + 1 :].split(".")[0])}
    parameter = module.get_parameter(name)
    found: set[int] = set()
    for owner, submodule in module.named_modules():
        if any(own is parameter for own in submodule.parameters(recurse=False)):
            found |= {0 if position == 0 else min(position, size + 1) for position in seen.called_at.get(owner, ())}
    return found or {0}


def _tokens(batch: Any) -> int | None:
    """The tokens of a sample, where the batch has whole numbers with a sequence in the second dimension."""
    for tensor in tree.tensors_of(batch):
        if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            return int(tensor.shape[1])
    return None
