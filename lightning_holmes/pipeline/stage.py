"""One rank's part of a module: its own layers, non-local layers, and steps that run from split point to split point.

The module keeps its full length, its names and its identity. Each layer's ``forward`` goes through a gate that knows
which stage of the rank is running:

- a layer of the stage runs; after the stage's last layer the output is kept, and the next layer's gate ends the step
  with :class:`StepEnd`;
- a non-local layer before the stage returns a placeholder, except the one right before the stage, which returns the
  tensors received from the previous stage;
- outside a step a non-local layer refuses to run.

Parameters of other stages keep their shapes, types and names but hold NaN in one element's memory, so that an error
of the trace turns the loss into NaN. The placeholders that non-local layers return are NaN, too, and stop a step that
computes with them (absent.py).
"""

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Absence, AbsentParameter, Placeholder, Source, detached, forget, placeholder
from lightning_holmes.errors import HolmesError, UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.outside import Outside
from lightning_holmes.pipeline.own_generators import OwnDraws
from lightning_holmes.pipeline.seeds import derive_seed, seed_all
from lightning_holmes.pipeline.state_watch import RepeatedChanges
from lightning_holmes.pipeline.structure import BEFORE, ModuleStructure
from lightning_holmes.plan.partition import Partition
from lightning_holmes.torch_private import is_broken_graph, is_compiled, is_in_backward


class StepEnd(BaseException):
    """Ends a user's step after a stage's last layer; not an ``Exception``, so that ``except Exception`` in user code
    does not catch it."""


@dataclass(slots=True, kw_only=True)
class StageRun:
    """One stage's pass over one microbatch: the tensors received and sent, and the position of the step.

    ``beside``: output tensors of layers of earlier stages on this rank that this stage reads in addition to the
    hidden state, by (layer, index of the tensor). ``kept``: the same of this stage's layers, for later stages.
    ``inside``: whether a layer of this stage runs.
    """

    stage: int
    step_name: str
    seed: int
    received: list[Tensor] = field(default_factory=list)
    payload: list[Tensor] | None = None
    beside: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    position: int = BEFORE
    ended: bool = False
    backward: bool = False
    inside: bool = False


_MOST_BLANKS = 4096
_disable: Any = torch.compiler.disable  # untyped in torch


class _Gate:
    """Replaces the forward of a layer; the same layer may be at several ``indices`` if it has no weights.

    The gate itself is not compiled: if the user compiled the layer or its caller, torch.compile goes on in the
    layer's own forward, and never treats the position of a step as a constant. A deep copy of the layer has the
    layer's own forward again, because a teacher or an averaged model is not part of the pipeline; a copy of a layer
    of another rank refuses to run.
    """

    def __init__(self, pipeline: "PipelineModule", layer: nn.Module, indices: list[int]) -> None:
        self._pipeline, self._layer, self._indices = pipeline, layer, indices
        self._forward = layer.forward
        self._is_patched = "forward" in vars(layer)
        self._arrive, self._leave = _disable(pipeline._arrive), _disable(pipeline._leave)
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, is_local, output = self._arrive(self._indices, args, kwargs)
        if not is_local:
            return output
        output = self._forward(*args, **kwargs)
        return output if index is None else self._leave(index, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._layer))
        if copied is None:  # not the layer is copied, but something that refers to its forward
            return self
        if not self._pipeline.holds(self._indices):
            return functools.partial(self._pipeline.refuse_nonlocal, self._indices[0])
        return (
            copy.deepcopy(self._forward, memo) if self._is_patched else types.MethodType(type(copied).forward, copied)
        )

    def __reduce__(self) -> Any:
        """Pickle the layer's own forward instead of the gate, as for ``torch.save(self.layers, path)`` in a hook,
        which sees the whole module."""
        return (_itself, (self._forward,)) if self._is_patched else (getattr, (self._layer, "forward"))


def _itself(value: Any) -> Any:
    return value


_Gate.__call__ = _disable(_Gate.__call__, recursive=False)  # type: ignore[method-assign]


class PipelineModule:
    """Reduces ``module`` to the ``stages`` which this rank runs.

    Args:
        module: the whole module, its parameters in place.
        structure: what the trace found; None for a module that is run whole (one stage).
        partition: which layers each stage holds.
        stages: this rank's stages, ascending.
        device: where random generators are seeded.
    """

    def __init__(
        self,
        module: nn.Module,
        structure: ModuleStructure | None,
        partition: Partition,
        stages: Sequence[int],
        device: torch.device,
    ) -> None:
        self.module = module
        self.device = device
        self.current: StageRun | None = None
        self.absence = Absence()
        self.draws: OwnDraws | None = None
        """Notices draws from generators of the module's own, in the step that runs now."""
        self.outside: Outside | None = None
        """Notices what the step that runs now changes outside of the module."""
        self.repeated: RepeatedChanges | None = None
        """Notices what several passes of the batch that runs now change on the module."""
        self._blanks: dict[tuple[str, int, tuple[int, ...], bool], list[Source]] = {}
        self._forwards: list[tuple[nn.Module, bool, Any]] = []
        self._elsewhere: dict[str, tuple[Source, bool]] = {}  # and whether reads are noticed
        self.flags: list[tuple[Any, str]] = [(part, "training") for part in module.modules()]
        self.flags += [(parameter, "requires_grad") for parameter in module.parameters()]
        self.divide(structure, partition, stages)

    @classmethod
    def whole(cls, module: nn.Module, device: torch.device, *, rank: int = 0) -> "PipelineModule":
        """A module that is not divided yet: one stage, which belongs to pipeline rank 0. Every rank has a whole copy,
        of which rank 0's counts."""
        return cls(module, None, Partition((1,)), (rank,), device)

    def divide(self, structure: ModuleStructure | None, partition: Partition, stages: Sequence[int]) -> None:
        """Take over these stages; :meth:`install` then frees the parameters of other stages."""
        self.structure = structure
        self.partition = partition
        self.stages = tuple(stages)
        self.notices_reads = not any(map(is_compiled, self.module.modules()))
        """Whether outputs of non-local layers are placeholders that detect reads; compiled code cannot take these and
        gets plain NaN tensors."""
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}
        vars(self).pop("parameters", None)
        vars(self).pop("names", None)
        if structure is None:
            self.local_parameters = {name for name, _ in self.module.named_parameters()}
        else:
            structure.check_chunks(len(self.stages))
            self.local_parameters = set().union(*(structure.parameters_of(partition, s) for s in self.stages))
        self._find_kept()

    def _find_kept(self) -> None:
        """Find the output tensors of layers that later stages read in addition to the hidden state, if all stages are
        on this rank: by stage the tensors that it reads, and by layer those that any stage reads."""
        self.reads_beside: dict[int, list[tuple[int, int]]] = {}
        self._kept: dict[int, set[int]] = {}
        self._layers: dict[str, int | None] = {}  # by name, the layer that holds it
        if self.structure is None or not 1 < len(self.stages) == self.num_stages:
            return
        for stage in self.stages:
            for layer, numbers in self.structure.read_beside(self.partition, stage).items():
                self.reads_beside.setdefault(stage, []).extend((layer, number) for number in numbers)
                self._kept.setdefault(layer, set()).update(numbers)

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.partition.num_stages

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by the names that they have once the module is divided and has memory; pruning, for one,
        renames them later."""
        return dict(self.module.named_parameters())

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """The names of all parameters, by ``id``."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def compiled_parameters(self) -> dict[str, bool]:
        """The parameters of compiled modules, and for each whether it belongs to a layer, so that its compiled code
        runs on that layer's stage only."""
        compiled = [f"{name}." if name else "" for name, part in self.module.named_modules() if is_compiled(part)]
        layers = tuple(f"{layer}." for layer in (() if self.structure is None else self.structure.layer_names))
        return {n: n.startswith(layers) for n in self.parameters if n.startswith(tuple(compiled))}

    def name_of(self, value: Any, name: str) -> str:
        """The name of ``value``, which is now found at ``name``: for a parameter, its first name when the module was divided."""
        return self.names.get(id(value), name)

    def is_owner(self, name: str) -> bool:
        """Whether this rank's stages hold the copy of parameter ``name`` that counts in norms and checkpoints."""
        return self.owner_stage(name) in self.stages

    def owner_stage(self, name: str) -> int:
        """The stage whose copy of parameter or buffer ``name`` counts."""
        if self.structure is None:
            return 0
        if name in self.structure.readers:
            return self.structure.stages_of(self.partition, name)[0]
        layer = self._layer_holding(name)
        if layer is not None:
            return self.partition.stage_of(layer)
        if name in self.structure.writers or name in self.parameters:
            return self.structure.stage_at(self.partition, self.structure.writers.get(name, BEFORE))
        owner = name.rpartition(".")[0]  # of a buffer that the traced steps have not written, but later ones may
        return self._stage_that_knows(owner, self.module.get_submodule(owner))

    def _layer_holding(self, name: str) -> int | None:
        assert self.structure is not None
        if name not in self._layers:
            held = (i for i, layer in enumerate(self.structure.layer_names) if name.startswith(f"{layer}."))
            self._layers[name] = next(held, None)
        return self._layers[name]

    def local_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose plain attributes this rank owns: its own layers, modules with parameters that no later
        stage reads, and on the last stage all others."""
        for name, submodule in self.module.named_modules():
            if self._stage_that_knows(name, submodule) in self.stages:
                yield name, submodule

    def _stage_that_knows(self, name: str, submodule: nn.Module) -> int:
        last = self.num_stages - 1
        if self.structure is None:
            return last
        layer = self._layer_holding(name + ".")
        if layer is not None:
            return self.partition.stage_of(layer)
        own = [self.name_of(p, "") for p in submodule.parameters(recurse=False)] if name else []
        readers = [self.structure.stages_of(self.partition, n)[-1] for n in own if n in self.structure.readers]
        return max(readers, default=last)

    def parameters_of(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters that one of this rank's stages reads, by name."""
        if stage not in self._parameters:
            names = self.local_parameters
            if self.structure is not None:
                names = self.structure.parameters_of(self.partition, stage)
            self._parameters[stage] = {n: p for n, p in self.parameters.items() if n in names}
        return self._parameters[stage]

    def describe_stage(self, stage: int) -> str:
        """The layers of a stage in words, or the class of a module that is not divided."""
        if self.structure is None:
            return type(self.module).__name__
        names, layers = self.structure.layer_names, self.partition.layers_of(stage)
        return names[layers[0]] if len(layers) == 1 else f"{names[layers[0]]} to {names[layers[-1]]}"

    def place_of(self, run: StageRun) -> str:
        """Describe the position of a step, for error messages."""
        if self.structure is None or run.position == BEFORE:
            return f"in {run.step_name}, before its first layer,"
        return f"in {run.step_name}, at or after {self.structure.layer_names[run.position]},"

    # installing and removing

    def install(self) -> None:
        """Put the gates in place and replace the parameters of other stages by placeholders, which frees their memory."""
        if self.structure is None:
            return
        self._install_gates()
        compiled = self.compiled_parameters
        for name, parameter in self.parameters.items():
            if name not in self.local_parameters:
                blank, cure = placeholder(dtensor.detached(parameter)), "pipeline_parallel_size=1"
                source = Source(absence=self.absence, what=name, cure=cure, blank=blank)
                self._elsewhere[name] = source, compiled.get(name, True)
                self.let_go(name)

    def let_go(self, name: str) -> None:
        """Free the value of a parameter of another stage."""
        parameter, (source, is_noticed) = self.parameters[name], self._elsewhere[name]
        dtensor.replace_local(parameter, source.blank)
        if is_noticed:
            self.absence.hide(parameter, source)

    def _install_gates(self) -> None:
        places: dict[nn.Module, list[int]] = {}
        for index, name in enumerate(() if self.structure is None else self.structure.layer_names):
            places.setdefault(self.module.get_submodule(name), []).append(index)
        for layer, indices in places.items():
            self._forwards.append((layer, "forward" in vars(layer), vars(layer).get("forward")))
            layer.forward = _Gate(self, layer, indices)

    def twin(self, copy: nn.Module) -> "PipelineModule":
        """The same stages of ``copy``, a copy of the module that shares its parameters, with gates of their own."""
        twin = PipelineModule(copy, self.structure, self.partition, self.stages, self.device)
        twin.parameters, twin.absence = self.parameters, self.absence
        twin._install_gates()
        return twin

    @property
    def is_past_layers(self) -> bool:
        """Whether the step that runs now is past its last layer: only the last stage's gets there."""
        return self.current is not None and (
            self.structure is None or self.current.position == self.structure.num_layers - 1
        )

    def uninstall(self) -> None:
        """Take the gates away; parameters of other stages remain placeholders until their values are set."""
        for layer, own, forward in self._forwards:
            if own:
                layer.forward = forward
            else:
                vars(layer).pop("forward", None)
        self._forwards.clear()
        for name in self._elsewhere:
            forget(self.parameters[name])
        self._elsewhere.clear()

    def standalone(self, value: Any, state: Mapping[str, Any]) -> Any:
        """Copy ``value``, with each module in it that is or has a part of this one replaced by a copy without gates,
        as outside of a run.

        Args:
            state: whole parameters by name, whose memory the copy shares. Other parameters are this rank's, or NaN if
                it has none.
        """
        ours = {id(part) for part in self.module.modules()} - {id(self.module)}
        memo: dict[int, Any] = {}

        def copied(child: Any) -> Any:
            if not isinstance(child, nn.Module):
                return tree.map_children(lambda _, inner: copied(inner), child) if tree.is_container(child) else child
            if ours.isdisjoint(id(part) for part in child.modules()):
                return child
            if not memo:
                memo.update((id(p), _alone(p, state.get(name))) for name, p in self.parameters.items())
            return copy.deepcopy(child, memo)

        value = copied(value)
        for layer, own, forward in self._forwards:
            if id(layer) in memo:
                vars(memo[id(layer)]).pop("forward", None)
                if own:
                    memo[id(layer)].forward = copy.deepcopy(forward, memo)
        return value

    def _arrive(
        self, indices: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int | None, bool, Any]:
        """Called before a layer. Returns its index, None outside a step; whether it runs here; and if not, the output in its place."""
        run = self.current
        expected = indices[0] if run is None else run.position + 1
        index = expected if expected in indices else indices[0]
        stage_of_layer = self.partition.stage_of(index)
        if run is None:
            if not self.holds(indices):
                self.refuse_nonlocal(index)
            return None, True, None
        if run.backward or (self.num_stages == 1 and is_in_backward()):  # that of an autograd.grad in the step
            self._check_recomputed(run, index, stage_of_layer, indices)
        else:
            if self.draws is not None:
                self.draws.arrive(is_first=run.position == BEFORE)
            if self.outside is not None and run.position == BEFORE and self.num_stages > 1:
                self.outside.begin()  # what comes before the layers runs on every stage
            self._go_to(run, index)
        if stage_of_layer == run.stage:
            self._seed(run, 2 * index + 2)
            self.absence.counts = not run.backward  # what the backward recomputes was checked in the forward
            run.inside = True
            return index, True, None
        self._seed(run, 2 * index + 3)
        is_received = index == self.partition.layers_of(run.stage)[0] - 1
        output_of = self._hand_on_received if is_received else self._nonlocal_output
        return index, False, output_of(run, index, args, kwargs)

    def holds(self, indices: Sequence[int]) -> bool:
        """Whether this rank can run the layer at ``indices``; a layer at several indices has no weights, so any rank can."""
        return len(indices) > 1 or self.partition.stage_of(indices[0]) in self.stages

    def refuse_nonlocal(self, index: int, *_: Any, **__: Any) -> None:
        """Raise HolmesError: a layer of another rank is run outside a step."""
        assert self.structure is not None
        raise HolmesError(
            f"layer {index} of {self.structure.layers} lives on stage {self.partition.stage_of(index)}, not on this rank: outside "
            f"training_step, validation_step, test_step and predict_step the module, or a copy of it, cannot be run while the "
            f"trainer does; run it after fit, when every rank has the whole module again"
        )

    def _leave(self, index: int, output: Any) -> Any:
        """Called after a layer that was run in a step: returns the output with which the step goes on."""
        run = self.current
        assert run is not None
        run.inside = False
        if self.draws is not None and not run.backward:
            self.draws.arrive(is_first=False)
        self._seed(run, 2 * index + 3)
        is_end = index == self.partition.num_layers - 1  # only the last stage runs what follows
        self.absence.counts = is_end and not run.backward
        is_last = index == self.partition.layers_of(run.stage)[-1] and run.stage != self.num_stages - 1
        if run.backward or not (is_last or index in self._kept):
            return output
        return self._keep(run, index, output, is_payload=is_last)

    def _check_recomputed(self, run: StageRun, index: int, stage_of_layer: int, indices: list[int]) -> None:
        """Refuse layers that activation checkpointing cannot run again in the backward (with the same random
        numbers): those at several indices, or on a later stage."""
        if len(indices) > 1:
            raise UnsupportedModuleError(
                f"activation checkpointing runs layer {index} again, but the same module is also layer "
                f"{indices[-1]}: give each place a module of its own"
            )
        if stage_of_layer > run.stage:
            raise UnsupportedModuleError(
                f"activation checkpointing around several layers at once reaches from stage {run.stage} into layer "
                f"{index}, which lives on stage {stage_of_layer}: checkpoint each layer by itself"
            )

    def _go_to(self, run: StageRun, index: int) -> None:
        """Move the step on to layer ``index``, or end it by StepEnd if the stage's last layer has run."""
        assert self.structure is not None
        if run.payload is not None and run.stage < self.num_stages - 1:
            run.ended = True
            raise StepEnd
        if index != run.position + 1:
            raise UnsupportedModuleError(
                f"{run.step_name} called layer {index} of {self.structure.layers} after layer {run.position}: this "
                f"step passes through the layers in another way than the one traced at the start; a pipeline needs "
                f"each layer once, in order"
            )
        run.position = index

    def _keep(self, run: StageRun, index: int, output: Any, *, is_payload: bool) -> Any:
        """Keep the output tensors that are sent on or that later stages on this rank read; returns copies, which the
        user's code may change in place."""
        assert self.structure is not None
        expected = self.structure.outputs[run.step_name][index]
        template, leaves = tree.flatten(output)
        if len(leaves) != len(expected.live) or not tree.same_template(template, expected.template):
            raise UnsupportedModuleError(
                f"layer {index} of {self.structure.layers} returned {tree.describe(template)}, but "
                f"{tree.describe(expected.template)} when {run.step_name} was traced: what a layer returns beside tensors "
                f"must not change from step to step under a pipeline"
            )
        for leaf in leaves:
            _refuse_placeholder(leaf)
        if is_payload:
            run.payload = [leaf for leaf, live in zip(leaves, expected.live, strict=True) if live]
        run.kept |= {(index, number): leaves[number] for number in self._kept.get(index, ()) if number < len(leaves)}
        return tree.unflatten(template, [leaf.clone() for leaf in leaves])

    def _hand_on_received(self, run: StageRun, index: int, args: Any, kwargs: Any) -> Any:
        assert self.structure is not None
        expected = self.structure.outputs[run.step_name][index]
        arrived = iter(run.received)
        blank = None if all(expected.live) else self._blank_leaves(run, index, args, kwargs)
        leaves = [
            _own_copy(next(arrived), shares=not changed) if live else blank[number]  # type: ignore[index]
            for number, (live, changed) in enumerate(zip(expected.live, expected.changed, strict=True))
        ]
        return tree.unflatten(expected.template, leaves)

    def _nonlocal_output(self, run: StageRun, index: int, args: Any, kwargs: Any) -> Any:
        assert self.structure is not None
        expected = self.structure.outputs[run.step_name][index]
        handed = {n: value for (layer, n), value in run.beside.items() if layer == index} if run.beside else None
        if not handed:
            return tree.unflatten(expected.template, self._blank_leaves(run, index, args, kwargs))
        count = len(expected.live)
        blank = self._blank_leaves(run, index, args, kwargs) if len(handed) < count else [None] * count
        leaves = [_own_copy(handed[number]) if number in handed else blank[number] for number in range(count)]
        return tree.unflatten(expected.template, leaves)  # type: ignore[arg-type]

    def _blank_leaves(self, run: StageRun, index: int, args: Any, kwargs: Any) -> list[Tensor]:
        """Placeholders of the traced shapes, with the traced lengths replaced by those of the present input."""
        assert self.structure is not None
        expected = self.structure.outputs[run.step_name][index]
        present = tree.first_shape((args, kwargs))
        key = run.step_name, index, present, torch.is_inference_mode_enabled()
        known = self._blanks.get(key)
        if known is not None:
            return self._stand_ins(known)
        then = expected.input_shape
        blanks = []
        for shape, dtype, changed in zip(expected.shapes, expected.dtypes, expected.changed, strict=True):
            lengths = [
                present[d] if d < len(then) and d < len(present) and length == then[d] else length
                for d, length in enumerate(shape)
            ]
            like = torch.empty((), dtype=getattr(torch, dtype), device=self.device).expand(lengths)
            blank = placeholder(like)
            blanks.append(blank.contiguous() if changed else blank)
        sources = self._sources(index, blanks, expected.changed)
        # worth keeping: a stage's step begins anew for each microbatch; outputs that a step changes are not reused
        if not any(expected.changed):
            if len(self._blanks) >= _MOST_BLANKS:  # shapes keep changing
                self._blanks.clear()
            self._blanks[key] = sources
        return self._stand_ins(sources)

    def _sources(self, index: int, blanks: Sequence[Tensor], changed: Sequence[bool]) -> list[Source]:
        """The Source of each placeholder in the output of a non-local layer."""
        assert self.structure is not None
        alone = len(self.stages) == self.num_stages
        cure = "num_chunks=1" if alone else "pipeline_parallel_size=1, num_chunks=1"
        names = [f"output {number} of layer {index} of {self.structure.layers}" for number in range(len(blanks))]
        return [
            Source(absence=self.absence, what=what, cure=cure, blank=blank, may_change=may_change)
            for what, blank, may_change in zip(names, blanks, changed, strict=True)
        ]

    def _stand_ins(self, sources: Sequence[Source]) -> list[Tensor]:
        """A new tensor for each source, since user code may put a hook or requires_grad_() on it."""
        return [source.stand_in() if self.notices_reads else source.blank.detach() for source in sources]

    def _seed(self, run: StageRun, place: int) -> None:
        seed_all(derive_seed(run.seed, place), self.device)

    # running

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Context for one batch, in which a step that computes with parameters of other pipeline ranks is stopped
        with AbsentValueError."""
        try:
            with self.absence.stepping():
                yield
        finally:
            self.absence.clear()

    @contextlib.contextmanager
    def running(self, run: StageRun) -> Iterator[StageRun]:
        """Context in which the gates act for ``run``."""
        previous, self.current, self.absence.counts = self.current, run, False
        draws = contextlib.nullcontext() if self.draws is None else self.draws.around(is_backward=run.backward)
        outside = self.outside
        repeated = None if run.backward else self.repeated
        if outside is not None:
            outside.begin()
        try:
            with draws, self.absence.stepping():
                yield run
            if outside is not None:
                name = f"{type(self.module).__name__}.{run.step_name}"
                outside.refuse_written(f"the backward of {name}" if run.backward else name)
            if repeated is not None:
                repeated.end_pass()
        finally:
            self.current = previous

    def forward_step(self, run: StageRun, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``step(*arguments)`` for ``run``; returns its output on the last stage, None on the others (see ``run.payload``).

        Raises:
            UnsupportedModuleError: the step did not pass through this stage as the trace did.
        """
        with self.running(run):
            try:
                output = step(*arguments)
            except StepEnd:
                return None
            except Exception as error:
                if self.structure is not None and is_broken_graph(error):
                    raise UnsupportedModuleError(
                        f"{run.step_name} runs layers of {self.structure.layers} inside code that was compiled with fullgraph=True: the "
                        f"graph has to break at each layer, where a stage may end. Leave fullgraph out, or compile the layers "
                        f"one by one: nn.ModuleList(torch.compile(layer, fullgraph=True) for layer in layers)"
                    ) from error
                raise
        if self.structure is None:
            return output
        if run.ended:
            raise UnsupportedModuleError(
                f"{run.step_name} went on after the pipeline had ended it after layer {run.position}: a bare `except:` or "
                f"`except BaseException:` around the model call swallows that end; catch Exception instead"
            )
        if output is None and self.num_stages == 1:
            return None  # no loss to train on; the step may return None before it reaches the layers
        last = run.stage == self.num_stages - 1
        if output is None and run.position < self.partition.layers_of(run.stage)[-1]:
            raise UnsupportedModuleError(
                f"{run.step_name} returned None before the layers of stage {run.stage} of {self.num_stages} had run: the other stages "
                f"would not skip the batch; return a loss of zero that passes through the layers, or leave such batches out of the data"
            )
        if run.position != self.structure.num_layers - 1 or (not last and run.payload is None):
            raise UnsupportedModuleError(
                f"{run.step_name} ended after layer {run.position} of {self.structure.layers}, which has "
                f"{self.structure.num_layers}: a pipeline needs every step to pass through all of them"
            )
        if not last:
            raise UnsupportedModuleError(f"{run.step_name} ended without leaving stage {run.stage}")
        tree.map_tensors(_refuse_placeholder, output)
        return output


def _alone(parameter: nn.Parameter, value: Any) -> nn.Parameter:
    """A plain parameter with ``value`` if that is the whole tensor, else with the values of ``parameter`` (NaN for a DTensor)."""
    if not isinstance(value, Tensor) or dtensor.is_dtensor(value) or value.shape != parameter.shape:
        of_group = dtensor.is_dtensor(parameter)
        value = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype) if of_group else detached(parameter)
    return nn.Parameter(value.detach().contiguous(), requires_grad=parameter.requires_grad)


def _refuse_placeholder(tensor: Tensor) -> Tensor:
    """Raise AbsentValueError if ``tensor`` is a placeholder; else return it."""
    if isinstance(tensor, (Placeholder, AbsentParameter)):
        tensor.refuse()
    return tensor


def _own_copy(received: Tensor, *, shares: bool = False) -> Tensor:
    """A tensor that user code may change in place, unlike a leaf that gets a gradient. ``shares``: it shares the
    memory of ``received``, whose values nothing else needs. A tensor that the traced step changes is copied instead,
    because the code before the change may run again."""
    if not received.requires_grad:
        return received
    return _Alias.apply(received) if shares else received.clone()  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """Identity in the same memory, whose result torch does not treat as a view of a leaf."""

    @staticmethod
    def forward(_: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient
