"""What tracing one microbatch found about a module: plain data, which ranks send to each other and the strategy reads.

Positions along a step: ``BEFORE`` the layers (-1), layer ``i`` (i), after them (``num_layers``). A *split
point* ``c`` lies between the layers ``c`` and ``c + 1``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.plan.partition import Partition

BEFORE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bypass:
    """A value that reaches a later position other than through the hidden state, and the split points that it forbids.

    ``output``: the layer, and the index of the value in its output; None if the value is not an output of a layer.
    Stages on one rank pass such tensors to each other, so that between them only other values are lost. ``is_outside``: the
    value is not on the module, so that the stages of one rank share it.
    """

    first_split_point: int
    last_split_point: int
    what: str
    output: tuple[int, int] | None = None
    is_outside: bool = False

    @property
    def reader(self) -> int:
        """The position that reads the value."""
        return self.last_split_point + 1

    def forbids(self, split_point: int, *, one_rank: bool = False) -> bool:
        """Whether the value would be lost at ``split_point``; ``one_rank``: all stages are on one rank."""
        if one_rank and (self.output is not None or self.is_outside):
            return False
        return self.first_split_point <= split_point <= self.last_split_point


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutput:
    """The output of a layer.

    ``template``: see tree.py. ``shapes``: of the tensors, as seen with ``input_shape``, the shape of the layer's
    first tensor argument. ``live``: which tensors later positions read. ``changed``: which are changed in place
    outside of the layers.
    """

    template: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    input_shape: tuple[int, ...]
    live: tuple[bool, ...]
    changed: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStructure:
    """How a LightningModule's steps use its layers.

    ``outputs[step_name]``: what each layer returns in that step. ``readers[name]``: the positions at which a parameter's value is read,
    not through the hidden state. ``writers[name]``: the last position at which a buffer is written, or a tensor in an attribute whose
    version does not tell. ``early_changes``: buffers, attributes and metrics that the step changes outside of the layers and before their
    end. ``changed_parameters``: parameters that a layer changes in place in its forward. ``kept_values``: Python values that the step
    changes on the module, at any position. ``step_metrics``: metrics that are logged on each step. ``computed_metrics``: metrics whose
    ``compute`` the step calls. ``draws``: the generators of its own from which the step draws. ``outside``: what the step writes outside
    of the module, such as a global.
    """

    layers: str
    layer_names: tuple[str, ...]
    readers: Mapping[str, frozenset[int]]
    outputs: Mapping[str, tuple[LayerOutput, ...]]
    writers: Mapping[str, int] = field(default_factory=dict)
    bypasses: tuple[Bypass, ...] = ()
    step_metrics: tuple[str, ...] = ()
    early_changes: tuple[str, ...] = ()
    changed_parameters: tuple[str, ...] = ()
    kept_values: tuple[str, ...] = ()
    computed_metrics: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """The length of the layer list."""
        return len(self.layer_names)

    def forbidden_cuts(self, *, one_rank: bool = False) -> list[int]:
        """The split points that lose a value; ``one_rank``: all stages are on one rank."""
        points = range(self.num_layers - 1)
        return [point for point in points if any(b.forbids(point, one_rank=one_rank) for b in self.bypasses)]

    def read_beside(self, partition: Partition, stage: int) -> dict[int, list[int]]:
        """The tensors of earlier layers' outputs that ``stage`` reads, by layer; without the layer right before the
        stage, whose output it receives anyway."""
        found: dict[int, set[int]] = {}
        for bypass in self.bypasses:
            if bypass.output is not None and self.stage_at(partition, bypass.reader) == stage:
                layer, number = bypass.output
                if layer < partition.layers_of(stage)[0] - 1:
                    found.setdefault(layer, set()).add(number)
        return {layer: sorted(numbers) for layer, numbers in sorted(found.items())}

    def check_partition(self, partition: Partition, *, one_rank: bool = False) -> None:
        """Refuse a partition with a split point that loses a value.

        Args:
            one_rank: all stages are on one rank.

        Raises:
            UnsupportedModuleError: names the value and the split point, and what to change.
        """
        for stage in range(partition.num_stages - 1):
            split_point = partition.layers_of(stage)[-1]
            lost = [b for b in self.bypasses if b.forbids(split_point, one_rank=one_rank)]
            if lost:
                cuts = self.forbidden_cuts(one_rank=one_rank)
                free = [point for point in range(self.num_layers - 1) if point not in cuts]
                cure = (
                    f"split points that lose nothing lie after the layers {free}: choose layer counts by partition=[...]"
                    if free
                    else "no split point of this layer list is free of it: use pipeline_parallel_size=1, or pass the value "
                    "along in the layers' own outputs"
                )
                more = f" (and {len(lost) - 1} more such values)" if len(lost) > 1 else ""
                raise UnsupportedModuleError(
                    f"splitting {self.layers} after layer {split_point} would lose {lost[0].what}{more}; {cure}"
                )

    def check_chunks(self, stages_of_rank: int) -> None:
        """Refuse several stages on one rank if a step changes the module's state before the end of the layers.

        Raises:
            UnsupportedModuleError: names what would be changed once for each stage.
        """
        if stages_of_rank > 1 and self.early_changes:
            shown = ", ".join(self.early_changes[:4])
            raise UnsupportedModuleError(
                f"the step changes {shown} before or between the layers: with {stages_of_rank} stages on a rank that "
                f"would happen {stages_of_rank} times; use num_chunks=1, or do it after the layers"
            )

    def parameters_of(self, partition: Partition, stage: int) -> set[str]:
        """Names of the parameters which ``stage`` needs; those that no traced step reads live on every stage."""
        return {name for name, readers in self.readers.items() if stage in self._stages(partition, readers)}

    def stages_of(self, partition: Partition, name: str) -> tuple[int, ...]:
        """The stages that hold parameter ``name``, in order; the first is its owner in norms and checkpoints."""
        return tuple(sorted(self._stages(partition, self.readers.get(name, frozenset()))))

    def stage_at(self, partition: Partition, position: int) -> int:
        """The stage that runs ``position``."""
        if position == BEFORE:
            return 0
        return partition.num_stages - 1 if position >= self.num_layers else partition.stage_of(position)

    def _stages(self, partition: Partition, readers: frozenset[int]) -> set[int]:
        stages = {self.stage_at(partition, position) for position in readers}
        return stages or set(range(partition.num_stages))  # read by no traced step, but perhaps by a later one

    def merged(self, other: "ModuleStructure") -> "ModuleStructure":
        """The structure for a module that runs both traced steps: everything that either step needs.

        Raises:
            UnsupportedModuleError: the steps run through different layer lists.
        """
        if self.layers != other.layers:
            raise UnsupportedModuleError(
                f"one step runs through {self.layers}, another through {other.layers}: name the list to split, such as layers={self.layers!r}"
            )
        readers = {n: self.readers.get(n, frozenset()) | other.readers.get(n, frozenset()) for n in self.readers}
        writers = dict(other.writers)
        for name, position in self.writers.items():
            writers[name] = max(position, writers.get(name, BEFORE))
        return replace(
            self,
            outputs={**self.outputs, **other.outputs},
            readers=readers,
            writers=writers,
            bypasses=tuple(dict.fromkeys(self.bypasses + other.bypasses)),
            step_metrics=tuple(dict.fromkeys(self.step_metrics + other.step_metrics)),
            early_changes=tuple(dict.fromkeys(self.early_changes + other.early_changes)),
            changed_parameters=tuple(dict.fromkeys(self.changed_parameters + other.changed_parameters)),
            kept_values=tuple(dict.fromkeys(self.kept_values + other.kept_values)),
            computed_metrics=tuple(dict.fromkeys(self.computed_metrics + other.computed_metrics)),
            draws=tuple(dict.fromkeys(self.draws + other.draws)),
            outside=tuple(dict.fromkeys(self.outside + other.outside)),
        )
