"""Learn a module's structure from one real microbatch, by following values from operator to operator.

A copy of the module that shares its parameters runs one step. Modes (following.py) see every operator and keep, for
each storage, the set of *sources* its values come from: parameters, the outputs of a layer, anything else computed
inside a layer. Each output of a layer starts a new source, so the sources that reach a position are
exactly the values that get there other than through the hidden state. From these follow

- which parameters each stage needs (``ModuleStructure.readers``): an embedding read only before the
  layers is on the first stage, a tied head on both ends, a time embedding that conditions every layer
  on each stage, with gradients summed;
- which split points would lose a value (``ModuleStructure.bypasses``): skip connections past a layer, losses of
  routers, lists of hidden states;
- what a layer's output looks like and which of its tensors must be sent.

The step runs a second time if it leaves a value on the module, because the next step may read that value on another
stage than the one that sets it. Python values kept in attributes are watched by attributes.py.

Numeric values are not checked: Python numbers that leave a layer neither by its output nor by an attribute are not
followed. ``lightning_holmes.check`` compares the numbers.
"""

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import UPDATE_COUNT, set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.attributes import (
    CONSTANTS,
    AttributeWatch,
    Place,
    Use,
    attribute_tensors,
    changes,
    plain_parts,
    snapshot,
)
from lightning_holmes.pipeline.following import FollowPython, FollowValues, Sources
from lightning_holmes.pipeline.layers import LayerCalls, NotTheLayersError, along_layers
from lightning_holmes.pipeline.outside import CURE, Outside
from lightning_holmes.pipeline.own_generators import OwnDraws, find_generators, set_states, states_of
from lightning_holmes.pipeline.replay import is_logged_now, log_arguments
from lightning_holmes.pipeline.shadow import shadow_copy
from lightning_holmes.pipeline.structure import BEFORE, Bypass, LayerOutput, ModuleStructure
from lightning_holmes.pipeline.whole_steps import (
    describe_call,
    noticing_compute,
    refusing_collectives,
    refusing_loggers,
    refusing_metrics,
)
from lightning_holmes.torch_private import has_backward_hook, tensor_version

_MAX_GRAPH_NODES = 200_000


def trace_step(
    module: pl.LightningModule,
    step_name: str,
    arguments: tuple[Any, ...],
    *,
    layers: str = "auto",
    context: Callable[[], Any] | None = None,
) -> ModuleStructure:
    """Trace ``step_name`` (say "training_step") of ``module`` on ``arguments`` and return the module's structure.

    Runs the step once or twice on a copy, without logging; the module itself is not changed. Call it where the whole
    module is; ``context`` returns a context manager for the step (precision).

    Raises:
        ConfigurationError: there is no such layer list.
        UnsupportedModuleError: the step calls no list of layers once each and in order, or does something that a
            pipeline cannot do exactly; the message names the reason.
    """
    return along_layers(module, step_name, layers, lambda name: Tracer(module, step_name, name).run(arguments, context))


class Tracer:
    """One traced run: notes where sources are read and changed, and makes the ModuleStructure from that."""

    def __init__(self, module: pl.LightningModule, step_name: str, layers: str) -> None:
        self.original = module
        self.step_name = step_name
        self.place = f"{type(module).__name__}.{step_name}"
        self.layers = layers
        self.shadow = shadow_copy(module)
        self.calls = LayerCalls(self.shadow, layers, self._pass_through)
        self.num_layers = len(self.calls.layers)
        self.sources = Sources(self.num_layers)
        self.is_running = self.has_logged = False
        self.parameter_bits: dict[str, int] = {}
        self.output_templates: dict[int, tuple[Any, list[Tensor], tuple[int, ...]]] = {}
        self.metrics = {n: m for n, m in self.shadow.named_modules() if isinstance(m, Metric)}
        self.step_metrics: list[str] = []
        self.computed_metrics: list[str] = []
        self.stale = 0  # number of sources of the first pass, while the second one runs
        self.read_before: dict[int, int] = {}
        self.output_keys: dict[int, tuple[int, int]] = {}
        self.changed_outputs: set[tuple[int, int]] = set()
        self.parameter_keys: dict[int, str] = {}
        self.parameter_writes: dict[str, set[int]] = {}
        self.saved_parameters: dict[str, tuple[nn.Parameter, Tensor, Tensor]] = {}
        self.uses: list[Use] = []
        self.sharded_outputs: set[tuple[int, int]] = set()
        mesh = module.device_mesh
        has_axis = mesh is not None and dtensor.AXIS in (mesh.mesh_dim_names or ())
        self.generators = find_generators(self.shadow)
        self.draws = OwnDraws(self.place, self.generators, states_of(self.generators))
        self.drawn: tuple[str, ...] = ()
        self.outside = Outside(module)
        self.changes_outside = False
        self.outside_early: list[str] = []
        self.outside_late: list[str] = []
        self.tensor_ranks = mesh[dtensor.AXIS].mesh.tolist() if mesh is not None and has_axis else None

    # the run

    def run(self, arguments: tuple[Any, ...], context: Callable[[], Any] | None) -> ModuleStructure:
        with self.outside.preserved():
            return self._run(arguments, context)

    def _run(self, arguments: tuple[Any, ...], context: Callable[[], Any] | None) -> ModuleStructure:
        self._refuse_layers()
        sources = self.sources
        for name, parameter in self.shadow.named_parameters():
            bit = sources.new("parameter", BEFORE)
            self.parameter_bits[name] = bit
            self.parameter_keys[sources.key(parameter.data)] = name
            sources.mark(parameter.data, bit)
        buffer_keys = {name: sources.key(b) for name, b in self.shadow.named_buffers()}
        self._silence()
        before = snapshot(self.shadow)
        kept = {p: (t, sources.key(t), tensor_version(t)) for p, t in attribute_tensors(self.shadow).items()}
        try:
            if self.step_name != "training_step":
                self.shadow.eval()
            set_trainer(self.shadow, trainer_of(self.original))
            output = self._pass(arguments, context)
            self.drawn = self.draws.drawn()
            changed = changes(before, snapshot(self.shadow))
            after = attribute_tensors(self.shadow)
            buffers = any(key in sources.written_at for key in buffer_keys.values())
            if changed or buffers or after.keys() != kept.keys() or sources.of(after.values()) or self.changes_outside:
                self.stale, self.read_before, sources.read_at = len(sources.kinds), sources.read_at, {}
                watch = AttributeWatch(self.shadow, changed, self._place, self.original)
                output = self._pass(arguments, context)
                watch.finish()
                self.uses = watch.uses
        finally:
            set_states(self.generators, self.draws.start)  # torch's are those of the module itself
            for parameter, data, value in self.saved_parameters.values():
                parameter.data = data
                parameter.data.copy_(value)
        self._refuse_reentrant(output)
        return self._structure(buffer_keys, kept)

    def _pass(self, arguments: tuple[Any, ...], context: Callable[[], Any] | None) -> Any:
        """Run the step once and return its output."""
        sources = self.sources
        sources.begin_pass()
        self.calls.begin()
        self.outside.begin()
        attributes = {name: sources.of([t]) for name, t in attribute_tensors(self.shadow).items()}
        step = getattr(self.shadow, self.step_name)
        arguments = tree.map_all_tensors(Tensor.clone, arguments)  # a step may change its batch
        grad = torch.enable_grad() if self.step_name == "training_step" else torch.no_grad()
        # Under a dispatch mode torch.compile gives up a function for good: later steps would run uncompiled.
        eager = torch.compiler.set_stance("force_eager")
        alone, loggers = refusing_collectives(self.shadow, self.place), refusing_loggers(self.shadow, self.place)
        metrics = refusing_metrics(self.place, lambda: self.has_logged)
        computing = noticing_compute(self.metrics, self.computed_metrics.append)
        values = FollowValues(sources, self.place, self._before_write, self.tensor_ranks, (*self.generators.values(),))
        python = FollowPython(sources, self.place, self._before_write)
        around = context() if context is not None else nullcontext()
        with grad, eager, alone, loggers, metrics, computing, values, python, around:
            self.is_running, self.has_logged = True, False
            try:
                output = step(*arguments)
            finally:
                self.is_running = False
        self.calls.end()
        self.outside_late = self._written_outside()
        sources.read(sources.of(tree.tensors_of(output)), self.num_layers)
        for name, tensor in attribute_tensors(self.shadow).items():
            owner = self._layer_of_attribute(name)
            taint = sources.of([tensor]) & ~attributes.get(name, 0)
            sources.read(taint, self.num_layers if owner is None else owner)
        return output

    def _written_outside(self) -> list[str]:
        """What the step has written outside of the module since this was last called."""
        self.changes_outside |= self.outside.has_changed()
        written = self.outside.written()
        self.outside.begin()
        return written

    def _place(self) -> Place | None:
        return (self.sources.here, self.sources.inside) if self.is_running else None

    def _refuse_layers(self) -> None:
        seen: dict[int, int] = {}
        for index, layer in enumerate(self.calls.layers):
            first = seen.setdefault(id(layer), index)
            if first != index and any(True for _ in (*layer.parameters(), *layer.buffers())):
                raise NotTheLayersError(
                    f"[{index}] is the same module as [{first}]: layers with weights that are passed through twice "
                    f"cannot lie on two stages"
                )
        for name, submodule in self.shadow.named_modules():
            if isinstance(submodule, torch.jit.ScriptModule):
                raise UnsupportedModuleError(
                    f"{name} is TorchScript, whose weights a pipeline cannot follow or take out: use the module itself, "
                    f"or compile it by torch.compile"
                )

    def _pass_through(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer; each tensor of its output becomes a new source."""
        sources = self.sources
        inputs = tree.tensors_of((args, kwargs))
        sources.position, sources.inside = index, True
        given = plain_parts((args, kwargs))
        self.draws.arrive(is_first=index == 0)
        if index == 0:
            self.outside_early = self._written_outside()
        output = forward(*args, **kwargs)
        sources.inside = False
        self.draws.arrive(is_first=False)
        if plain_parts((args, kwargs)) != given:
            raise UnsupportedModuleError(
                f"layer {index} of {self.layers} changes Python values in an argument it is given: later stages "
                f"would not see that; hand the values on in its output, or use pipeline_parallel_size=1"
            )
        template, leaves = tree.flatten(output)
        self._refuse_constants(index, template)
        sources.read(sources.of(leaves), index)  # a layer that only makes views (Flatten) reads what it returns
        sources.paused = True
        leaves = [leaf.clone() for leaf in leaves]
        sources.paused = False
        self.sharded_outputs |= {(index, n) for n, leaf in enumerate(leaves) if dtensor.is_dtensor(leaf)}
        for number, leaf in enumerate(leaves):
            sources.mark(leaf, sources.new("output", index, number), replace=True)
            self.output_keys[sources.key(leaf)] = index, number
        shape = tuple(inputs[0].shape) if inputs else ()
        self.output_templates[index] = (template, leaves, shape)
        return tree.unflatten(template, leaves)

    def _refuse_constants(self, index: int, template: Any) -> None:
        """Refuse layer outputs that contain objects other than tensors and plain values: only plain values are the
        same on every stage."""
        if tree.is_container(template):
            for _, child in tree.children_of(template):
                self._refuse_constants(index, child)
        elif not isinstance(template, (tree.Leaf, *CONSTANTS, types.FunctionType)):
            raise UnsupportedModuleError(
                f"layer {index} of {self.layers} returns an object of class {type(template).__name__}, which cannot "
                f"travel between stages: return tensors, numbers, strings, and lists, dicts or dataclasses of them"
            )

    def _before_write(self, tensor: Tensor) -> None:
        """Note that a tensor is about to be changed in place. A parameter may only be changed by a layer; its value is saved, to be
        restored after the trace."""
        sources = self.sources
        key = sources.key(tensor)
        if key in self.output_keys and not sources.inside:
            self.changed_outputs.add(self.output_keys[key])
        name = self.parameter_keys.get(key)
        if name is None:
            return
        if not sources.inside:
            raise UnsupportedModuleError(
                f"{self.place} changes the parameter {name} in place: stages that do "
                f"not hold it could not follow; make it a buffer or do this between batches with a callback, or use "
                f"pipeline_parallel_size=1"
            )
        self.parameter_writes.setdefault(name, set()).add(sources.position)
        if name not in self.saved_parameters:
            parameter = self.shadow.get_parameter(name)
            sources.paused, paused = True, sources.paused
            self.saved_parameters[name] = parameter, parameter.data, parameter.data.clone()
            sources.paused = paused

    def _silence(self) -> None:
        """Replace ``self.log`` by a recorder, and refuse logging through submodules."""
        shadow = self.shadow

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            is_now = is_logged_now(self.step_name, log_arguments(name, value, *args, **kwargs))
            self.has_logged = self.has_logged or is_now
            if isinstance(value, Metric):
                if is_now:
                    found = [n for n, m in shadow.named_modules() if m is value]
                    self.step_metrics.extend(found)
            elif isinstance(value, Tensor):
                self.sources.read(self.sources.of([value]))

        for name, submodule in shadow.named_modules():
            if name and isinstance(submodule, pl.LightningModule):
                object.__setattr__(submodule, "log", self._refused_log(name))
        object.__setattr__(shadow, "log", log)

    def _refused_log(self, name: str) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            raise UnsupportedModuleError(describe_call(self.place, f"{name}.log"))

        return log

    def _layer_of_attribute(self, name: str) -> int | None:
        prefix = f"{self.layers}."
        if not name.startswith(prefix):
            return None
        index = name[len(prefix) :].split(".")[0]
        return self.calls.names.index(index) if index in self.calls.names else None

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

    # the resulting structure

    def _structure(self, buffer_keys: dict[str, int], kept: dict[str, tuple[Tensor, int, int]]) -> ModuleStructure:
        sources = self.sources
        for name, buffer in self.shadow.named_buffers():
            key = sources.key(buffer)
            if key != buffer_keys.get(name):  # newly assigned: counts as written at the end of the step
                sources.written_at[buffer_keys.get(name, key)] = self.num_layers
                if self._layer_of_attribute(name) is None:
                    sources.read(sources.of([buffer]), self.num_layers)
        readers = {
            name: frozenset(
                position
                for reads in (sources.read_at, self.read_before)
                for position, taint in reads.items()
                if taint & bit
            )
            for name, bit in self.parameter_bits.items()
        }
        names_of = {id(p): name for name, p in self.shadow.named_parameters()}
        for index, own in enumerate(self.calls.layers):
            for parameter in own.parameters():  # also parameters that this microbatch has not used: experts, LayerDrop
                readers[names_of[id(parameter)]] |= {index}
        for name, written in self.parameter_writes.items():
            if len(written | readers[name]) > 1:
                raise UnsupportedModuleError(
                    f"layer {min(written)} of {self.layers} changes the parameter {name} in place, which is also read elsewhere: in a pipeline only "
                    f"one layer may do both; make it a buffer, change it between batches, or use pipeline_parallel_size=1"
                )
        bypasses = []
        live: set[tuple[int, int]] = set()
        for number, (kind, position, index) in enumerate(sources.kinds):
            if kind == "parameter":
                continue
            bit, stale = 1 << number, number < self.stale
            what = (
                f"a value computed inside layer {position}"
                if kind == "inside"
                else f"output {index} of layer {position}"
            )
            for reader in _readers(self.read_before if stale else sources.read_at, bit):
                if kind == "output" and reader > position:
                    live.add((position, index))
                first = position if kind == "inside" else position + 1
                if reader - 1 >= first:
                    bypasses.append(
                        Bypass(
                            first_split_point=first,
                            last_split_point=reader - 1,
                            what=f"{what}, read {self._where(reader)}",
                            output=(position, index) if kind == "output" and index >= 0 else None,
                        )
                    )
            for reader in _readers(sources.read_at, bit) if stale else ():
                if reader < position:
                    what = f"{what}, kept and read {self._where(reader)} of the next step"
                    bypasses.append(Bypass(first_split_point=max(reader, 0), last_split_point=position - 1, what=what))
        bypasses += self._bypasses_of_attributes() + self._bypasses_of_hooks()
        for what in self.outside_late:
            what = f"{what}, which the step changes where the ranks of other stages do not see it ({CURE})"
            end = self.num_layers - 2
            bypasses.append(Bypass(first_split_point=0, last_split_point=end, what=what, is_outside=True))
        for layer, number in sorted(self.sharded_outputs):
            what = (
                f"the layout of output {number} of layer {layer}, a DTensor, of which only plain tensors travel between "
                f"stages (let the layer return its part by use_local_output=True, or the whole tensor)"
            )
            bypasses.append(Bypass(first_split_point=layer, last_split_point=layer, what=what))
        names = [f"{self.layers}.{name}" for name in self.calls.names]
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
                    changed=tuple((layer, number) in self.changed_outputs for number in range(len(leaves))),
                )
            )
        # other tensors only if writes to them, through ``.data``, go unnoticed
        hidden = [
            (path.rpartition(".")[0], key) for path, (t, key, before) in kept.items() if tensor_version(t) == before
        ]
        writers = {
            name: sources.written_at[key] for name, key in (*buffer_keys.items(), *hidden) if key in sources.written_at
        }
        return ModuleStructure(
            layers=self.layers,
            layer_names=tuple(names),
            readers=readers,
            outputs={self.step_name: tuple(outputs)},
            writers=writers,
            bypasses=tuple(bypasses),
            step_metrics=tuple(dict.fromkeys(self.step_metrics)),
            early_changes=tuple(self._early_changes(buffer_keys)),
            changed_parameters=tuple(self.parameter_writes),
            computed_metrics=tuple(dict.fromkeys(self.computed_metrics)),
            draws=self.drawn,
            outside=(*self.outside_early, *self.outside_late),
            kept_values=tuple(use.name for use in self.uses if use.grew_at and use.key != UPDATE_COUNT),
        )

    def _where(self, position: int) -> str:
        if position == BEFORE:
            return "before the layers"
        return "after the last layer" if position == self.num_layers else f"in layer {position}"

    def _bypasses_of_hooks(self) -> list[Bypass]:
        """The bypasses of full backward hooks: such a hook needs the gradients of a module's output and input in one
        backward, so no stage may end between them."""
        found = []
        for name, part in self.original.named_modules() if self.step_name == "training_step" else ():
            within = [
                index
                for index, layer in enumerate(f"{self.layers}.{each}" for each in self.calls.names)
                if f"{layer}.".startswith(f"{name}." if name else "")
            ]
            if within and has_backward_hook(part):
                what = f"the gradient of its input for a hook on {name or 'the module'} (register_full_backward_hook)"
                last = min(within[-1], self.num_layers - 2)
                found.append(Bypass(first_split_point=within[0], last_split_point=last, what=what))
        return found

    def _bypasses_of_attributes(self) -> list[Bypass]:
        """The bypasses of Python values that are set at one position and read at another, which another stage may run."""
        found = []
        for use in self.uses:
            if use.key == UPDATE_COUNT:  # of a metric, whose state is taken from the last stage
                continue
            for written, from_layer in sorted(use.written):
                for read, in_layer in sorted(use.read):
                    ends = [written, read]
                    if not in_layer and 0 <= read < self.num_layers - 1:
                        ends.append(read + 1)  # read between layers: both neighbouring layers may use it
                    if not from_layer and read >= written:
                        continue  # the stage that reads the value has also run the code that sets it
                    first, last = max(min(ends), 0), max(ends) - 1
                    if last >= first:
                        later = " of the next step" if read < written else ""
                        what = (
                            f"{use.name}, a Python value set {self._where(written)} and read {self._where(read)}{later}"
                        )
                        found.append(Bypass(first_split_point=first, last_split_point=last, what=what))
        return found

    def _early_changes(self, buffer_keys: dict[str, int]) -> list[str]:
        """The names of what the step changes on the module outside of the layers and before the last one ends: every
        stage changes it."""
        names = [name for name, key in buffer_keys.items() if key in self.sources.written_early] + self.outside_early
        for use in self.uses:
            if any(not inside and position < self.num_layers for position, inside in use.grew_at):
                names.append(use.owner if use.key == UPDATE_COUNT else use.name)
        return names


def _readers(reads: dict[int, int], bit: int) -> list[int]:
    return sorted(position for position, taint in reads.items() if taint & bit)
