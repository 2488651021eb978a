"""Learning a module's structure from one real microbatch, by following values from operator to operator.

A copy of the module (its parameters shared, all else its own) runs one step. A dispatch mode sees every
operator and keeps, for each storage, the set of *sources* its values come from: parameters, the outputs of
a layer, anything else computed inside a layer. A layer's outputs start a new source each, so what remains
is exactly what reaches a place beside the hidden state. From that follow

- which parameters each stage needs (``ModuleStructure.readers``): an embedding read only before the
  layers lives on the first stage, a tied head on both ends, a time embedding that conditions every layer
  on each stage, with gradients summed;
- which cuts would lose a value (``ModuleStructure.bypasses``): skips past a layer, losses of routers,
  lists of hidden states;
- what a layer's output looks like and which of its tensors must travel.

Left to others: what a value is worth. Python numbers taken from tensors (``.item()``) inside a layer are
not followed further; ``lightning_holmes.check`` compares the numbers.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.layers import candidate_layer_lists
from lightning_holmes.pipeline.structure import BEFORE, Bypass, LayerOutput, ModuleStructure
from lightning_holmes.torch_private import TorchDispatchMode, operator_name, written_arguments

# operators whose result depends on the shape and type of a tensor, not on its values
_VALUE_FREE = frozenset(
    f"aten::{name}"
    for name in [
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_empty_strided",
        "sym_size",
        "sym_numel",
        "sym_stride",
        "empty_strided",
    ]
)
_TO_PYTHON = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_READ_BY_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MAX_GRAPH_NODES = 200_000


def trace_step(
    module: LightningModule,
    step_name: str,
    arguments: tuple[Any, ...],
    *,
    layers: str = "auto",
    context: Callable[[], Any] | None = None,
) -> ModuleStructure:
    """The structure of ``module`` as ``step_name`` (say "training_step") uses it on ``arguments``.

    Runs the step once on a copy, logging silenced, the module itself untouched. Call it where the whole
    module is; ``context`` gives a context manager for the step (precision).

    Raises:
        ConfigurationError: no such layer list.
        UnsupportedModuleError: no list of layers that this step calls once each, in order; or a step that
            does what a pipeline cannot do exactly. Names the reason.
    """
    reasons = []
    for candidate in candidate_layer_lists(module, layers):
        try:
            return _Tracer(module, step_name, candidate.name).run(arguments, context)
        except _NotTheLayers as reason:
            reasons.append(f"{candidate.describe()}: {reason}")
    raise UnsupportedModuleError(
        f"{type(module).__name__}.{step_name} calls no list of layers once each and in order, so there is "
        f"nothing to cut a pipeline along. Tried {'; '.join(reasons)}. Name another list by layers=, or use "
        f"pipeline_parallel_size=1"
    )


class _NotTheLayers(Exception):
    """The chosen list is not what the step runs through; another candidate may be."""


def shadow_copy(module: LightningModule) -> LightningModule:
    """A deep copy of ``module`` that shares its parameters, data sets and loaders, and whatever cannot be copied."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    for submodule in module.modules():
        for value in vars(submodule).values():
            if isinstance(value, (Dataset, DataLoader, torch.Generator)):
                memo[id(value)] = value
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        for submodule in module.modules():
            for key, value in vars(submodule).items():
                if key in ("_modules", "_parameters", "_trainer"):
                    continue
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


class _Tracer:
    """One traced run: the sources, where they are read, and the verdict."""

    def __init__(self, module: LightningModule, step_name: str, layers: str) -> None:
        self.original = module
        self.step_name = step_name
        self.layers = layers
        self.shadow = shadow_copy(module)
        self.layer_list = list(self.shadow.get_submodule(layers).children())
        self.num_layers = len(self.layer_list)
        self.position = BEFORE
        self.inside = False
        self.called: list[int] = []
        self.sources: list[tuple[str, int, int]] = []  # (kind, position, index or -1), bit = index in this list
        self.parameter_bits: dict[str, int] = {}
        self.layer_bits: dict[int, int] = {}
        self.taint: dict[int, int] = {}
        self.pinned: list[Any] = []
        self.read_at: dict[int, int] = {}
        self.written_at: dict[int, int] = {}
        self.output_templates: dict[int, tuple[Any, list[Tensor], tuple[int, ...]]] = {}
        self.step_metrics: list[str] = []
        self.paused = False

    # sources and storages

    def new_source(self, kind: str, position: int, index: int = -1) -> int:
        self.sources.append((kind, position, index))
        return 1 << (len(self.sources) - 1)

    def key(self, tensor: Tensor) -> int:
        """What identifies a tensor's memory while ``pinned`` keeps it alive; 0 if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return 0
        return storage.data_ptr()

    def taint_of(self, tensors: list[Tensor]) -> int:
        taint = 0
        for tensor in tensors:
            taint |= self.taint.get(self.key(tensor), 0)
        return taint

    def mark(self, tensor: Tensor, taint: int, *, replace: bool = False) -> None:
        key = self.key(tensor)
        if key == 0:
            return
        self.pinned.append(tensor.detach() if not tensor.is_inference() else tensor)
        self.taint[key] = taint if replace else self.taint.get(key, 0) | taint

    def read(self, taint: int, position: int | None = None) -> None:
        """Note that values of ``taint`` matter at ``position`` (the present one)."""
        where = self.here if position is None else position
        self.read_at[where] = self.read_at.get(where, 0) | taint

    @property
    def here(self) -> int:
        """The position of what runs now: between two layers it is that of the first, which its stage runs on to."""
        last = self.num_layers - 1
        return self.num_layers if self.position == last and not self.inside else self.position

    # the run

    def run(self, arguments: tuple[Any, ...], context: Callable[[], Any] | None) -> ModuleStructure:
        seen: dict[int, int] = {}
        for index, layer in enumerate(self.layer_list):
            if id(layer) in seen:
                raise UnsupportedModuleError(
                    f"{self.layers}[{index}] is the same module as {self.layers}[{seen[id(layer)]}]: layers that are "
                    f"passed through twice cannot lie on two stages; use pipeline_parallel_size=1"
                )
            seen[id(layer)] = index
        for name, parameter in self.shadow.named_parameters():
            bit = self.new_source("parameter", BEFORE, len(self.parameter_bits))
            self.parameter_bits[name] = bit
            self.mark(parameter.data, bit)
        for index in range(self.num_layers):
            self.layer_bits[index] = self.new_source("inside", index)
        buffer_keys = {name: self.key(b) for name, b in self.shadow.named_buffers()}
        attributes = {name: self.taint.get(self.key(t), 0) for name, t in _attribute_tensors(self.shadow).items()}
        for index, layer in enumerate(self.layer_list):
            layer.forward = self._gate(index, layer.forward)
        restore = self._silence()
        trainer = self.original._trainer
        grad = torch.enable_grad() if self.step_name == "training_step" else torch.no_grad()
        try:
            if self.step_name != "training_step":
                self.shadow.eval()
            self.shadow._trainer = trainer
            step = getattr(self.shadow, self.step_name)
            with grad, _FollowValues(self), _FollowPython(self), context() if context is not None else nullcontext():
                output = step(*arguments)
        finally:
            restore()
        if self.called != list(range(self.num_layers)):
            self._refuse_calls()
        self.read(self.taint_of(tree.tensors_of(output)), self.num_layers)
        for name, tensor in _attribute_tensors(self.shadow).items():
            owner = self._layer_of_attribute(name)
            taint = self.taint.get(self.key(tensor), 0) & ~attributes.get(name, 0)
            self.read(taint, self.num_layers if owner is None else owner)
        self._refuse_reentrant(output)
        return self._structure(buffer_keys)

    def _gate(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(*args: Any, **kwargs: Any) -> Any:
            expected = self.called[-1] + 1 if self.called else 0
            if index != expected:
                self.called.append(index)
                self._refuse_calls()
            if self.inside:
                raise _NotTheLayers(f"layer {index} is called inside layer {self.called[-1]}")
            self.called.append(index)
            inputs = tree.tensors_of((args, kwargs))
            self.position, self.inside = index, True
            output = forward(*args, **kwargs)
            self.inside = False
            template, leaves = tree.flatten(output)
            self.read(self.taint_of(leaves), index)  # a layer that only makes views (Flatten) reads what it hands on
            self.paused = True
            leaves = [leaf.clone() for leaf in leaves]
            self.paused = False
            for number, leaf in enumerate(leaves):
                self.mark(leaf, self.new_source("output", index, number), replace=True)
            shape = tuple(inputs[0].shape) if inputs else ()
            self.output_templates[index] = (template, leaves, shape)
            return tree.unflatten(template, leaves)

        return gate

    def _refuse_calls(self) -> None:
        called = self.called
        if not called:
            raise _NotTheLayers("the step never calls them")
        for place, index in enumerate(called):
            if index in called[:place]:
                raise _NotTheLayers(f"the step passes through layer {index} twice")
        missing = sorted(set(range(self.num_layers)) - set(called))
        if sorted(called) == called and missing and called != list(range(len(called))):
            raise _NotTheLayers(f"the step skips layer {missing[0]}")
        if called != sorted(called):
            raise _NotTheLayers(f"the step calls them in the order {called[:8]}")
        raise _NotTheLayers(f"the step never calls layer {missing[0]}")

    def _silence(self) -> Callable[[], None]:
        """Record instead of log; refuse what reaches other ranks or loggers from inside a step."""
        shadow = self.shadow

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, Metric):
                on_step = kwargs.get("on_step", args[2] if len(args) > 2 else None)
                if on_step or (on_step is None and self.step_name == "training_step"):
                    found = [n for n, m in shadow.named_modules() if m is value]
                    self.step_metrics.extend(found)
            elif isinstance(value, Tensor):
                self.read(self.taint.get(self.key(value), 0), self.here)

        def all_gather(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedModuleError(
                f"{type(self.original).__name__}.{self.step_name} calls self.all_gather: the stages of a pipeline run "
                f"different parts of a step, so a collective inside it would hang; gather in an epoch-end hook, or "
                f"use pipeline_parallel_size=1"
            )

        for name, replacement in (("log", log), ("all_gather", all_gather)):
            object.__setattr__(shadow, name, replacement)
        trainer = self.original._trainer
        if trainer is None:
            return lambda: None
        loggers = trainer.loggers
        trainer.loggers = [_LoggerProbe(type(self.original).__name__, self.step_name) for _ in loggers]  # type: ignore[misc]

        def restore() -> None:
            trainer.loggers = loggers

        return restore

    def _layer_of_attribute(self, name: str) -> int | None:
        prefix = f"{self.layers}."
        if not name.startswith(prefix):
            return None
        index = name[len(prefix) :].split(".")[0]
        names = [n for n, _ in self.shadow.get_submodule(self.layers).named_children()]
        return names.index(index) if index in names else None

    def _refuse_reentrant(self, output: Any) -> None:
        stack: list[Any] = [t.grad_fn for t in tree.tensors_of(output) if t.grad_fn is not None]
        seen: set[Any] = set()
        while stack and len(seen) < _MAX_GRAPH_NODES:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name() == "CheckpointFunctionBackward":
                raise UnsupportedModuleError(
                    f"{type(self.original).__name__} uses reentrant activation checkpointing, which hides the layers "
                    f"from autograd: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or with "
                    f"Hugging Face gradient_checkpointing_enable({{'use_reentrant': False}})"
                )
            stack.extend(parent for parent, _ in node.next_functions)

    # the verdict

    def _structure(self, buffer_keys: dict[str, int]) -> ModuleStructure:
        readers = {
            name: frozenset(position for position, taint in self.read_at.items() if taint & bit)
            for name, bit in self.parameter_bits.items()
        }
        bypasses = []
        live: set[tuple[int, int]] = set()
        after = self.num_layers
        for number, (kind, position, index) in enumerate(self.sources):
            if kind == "parameter":
                continue
            bit = 1 << number
            for reader in sorted(p for p, taint in self.read_at.items() if taint & bit):
                if kind == "output" and reader > position:
                    live.add((position, index))
                first = position if kind == "inside" else position + 1
                if reader - 1 >= first:
                    place = "after the last layer" if reader == after else f"in layer {reader}"
                    what = "a value computed inside" if kind == "inside" else f"output {index} of"
                    bypasses.append(
                        Bypass(
                            first_cut=first,
                            last_cut=reader - 1,
                            what=f"{what} layer {position}, read {place}",
                        )
                    )
        names = [f"{self.layers}.{n}" for n, _ in self.original.get_submodule(self.layers).named_children()]
        outputs = []
        for layer in range(self.num_layers):
            template, leaves, input_shape = self.output_templates[layer]
            outputs.append(
                LayerOutput(
                    template=template,
                    shapes=tuple(tuple(leaf.shape) for leaf in leaves),
                    dtypes=tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves),
                    input_shape=input_shape,
                    live=tuple((layer, number) in live for number in range(len(leaves))),
                )
            )
        writers = {name: self.written_at[key] for name, key in buffer_keys.items() if key in self.written_at}
        return ModuleStructure(
            layers=self.layers,
            layer_names=tuple(names),
            readers=readers,
            outputs={self.step_name: tuple(outputs)},
            buffer_writers=writers,
            bypasses=tuple(bypasses),
            step_metrics=tuple(dict.fromkeys(self.step_metrics)),
        )


class _FollowValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the sources of every operator's inputs to its outputs."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        if tracer.paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UnsupportedModuleError(
                f"{type(tracer.original).__name__}.{tracer.step_name} calls the collective {name}: the stages of a "
                f"pipeline run different parts of a step, so it would hang; use pipeline_parallel_size=1"
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise UnsupportedModuleError(
                f"{type(tracer.original).__name__}.{tracer.step_name} draws from a torch.Generator of its own, which "
                f"the stages cannot keep in step; draw from torch's default generator"
            )
        inputs = tree.tensors_of((args, kwargs))
        taint = tracer.taint_of(inputs)
        keys = {tracer.key(t) for t in inputs}
        output = func(*args, **kwargs)
        if name in _VALUE_FREE:
            taint = 0
        if name in _TO_PYTHON:
            _read_by_python(tracer, taint)
            return output
        written = [t for value in written_arguments(func, args, kwargs) for t in tree.tensors_of(value)]
        results = tree.tensors_of(output) if tree.is_container(output) or isinstance(output, Tensor) else []
        fresh = [t for t in results if tracer.key(t) not in keys]
        if written or fresh or not results:
            if tracer.inside:
                tracer.read(taint)
                taint |= tracer.layer_bits[tracer.position]
            elif tracer.here == tracer.num_layers:
                tracer.read(taint)
        for tensor in written:
            tracer.mark(tensor, taint)
            tracer.written_at[tracer.key(tensor)] = tracer.here
        for tensor in fresh:
            tracer.mark(tensor, taint)
        return output


class _FollowPython(TorchFunctionMode):
    """Sees the ways from a tensor to Python that no operator shows."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_BY_PYTHON and args:
            _read_by_python(self.tracer, self.tracer.taint_of(tree.tensors_of(args[0])))
        return func(*args, **(kwargs or {}))


def _read_by_python(tracer: _Tracer, taint: int) -> None:
    """A value became a Python number: inside a layer its own affair, elsewhere every later place may depend on it."""
    if tracer.inside:
        tracer.read(taint)
    else:
        for position in range(max(tracer.position, 0), tracer.num_layers + 1):
            tracer.read(taint, position)


class _LoggerProbe:
    """Stands for a logger while a step is traced; only ``self.log`` reaches loggers from a pipeline's stages."""

    def __init__(self, module: str, step_name: str) -> None:
        self._place = f"{module}.{step_name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModuleError(
            f"{self._place} uses self.logger directly (.{name}): loggers are on rank 0, which holds the first stage "
            f"and never sees the loss; use self.log, or log from a hook at the end of a batch or an epoch"
        )


def _attribute_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module keeps as plain attributes, alone or in containers, by path."""
    found: dict[str, Tensor] = {}
    skip = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_backward_hooks", "_trainer", "_fabric")
    for name, submodule in module.named_modules():
        if isinstance(submodule, Metric):
            continue
        for key, value in vars(submodule).items():
            if key in skip or not (isinstance(value, Tensor) or tree.is_container(value)):
                continue
            for index, tensor in enumerate(tree.tensors_of(value)):
                found[f"{name}.{key}.{index}" if name else f"{key}.{index}"] = tensor
    return found
