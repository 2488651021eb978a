"""Partition: which layers each stage holds.

It owns the counts and their checks. Where a stage lives is said by one rule that all schedules share: stage s
is on pipeline rank s % pipeline_parallel_size, as its chunk s // pipeline_parallel_size.

    partition = make_partition("uniform", num_layers=10, num_stages=4)
    partition.layer_counts      # (2, 3, 3, 2)
    partition.layers_of(1)      # range(2, 5)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers of each stage, in order. layer_counts has one positive entry per stage."""

    layer_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layer_counts:
            raise ConfigurationError("partition: there are no counts; give one per stage")
        for stage, count in enumerate(self.layer_counts):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(
                    f"partition={list(self.layer_counts)}: stage {stage} has {count!r} layers; "
                    "every stage needs a whole number, at least 1"
                )

    @property
    def num_layers(self) -> int:
        """Layers of all stages."""
        return sum(self.layer_counts)

    @property
    def num_stages(self) -> int:
        """Pipeline ranks times chunks."""
        return len(self.layer_counts)

    def layers_of(self, stage: int) -> range:
        """The indices of the layers that a stage holds."""
        assert 0 <= stage < self.num_stages, stage
        first = sum(self.layer_counts[:stage])
        return range(first, first + self.layer_counts[stage])

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        assert 0 <= layer < self.num_layers, layer
        return next(stage for stage in range(self.num_stages) if layer in self.layers_of(stage))


def make_uniform_partition(num_layers: int, num_stages: int) -> Partition:
    """The same number of layers for every stage, as nearly as it goes.

    A remainder of r layers goes to r stages, one each. The last stage is never among them: it also computes
    the output head and the loss, which cost more than a layer. The first is among them only when all others
    but the last are: it also has the embedding. Of the middle stages the later come first: with 1F1B a stage
    holds the fewer microbatches in memory the later it stands.
    """
    _check_enough_layers(num_layers, num_stages)
    each, remainder = divmod(num_layers, num_stages)
    order = [*range(num_stages - 2, 0, -1), 0, num_stages - 1]
    extra = set(order[:remainder])
    return Partition(tuple(each + (stage in extra) for stage in range(num_stages)))


def make_partition(spec: str | Sequence[int], num_layers: int, num_stages: int) -> Partition:
    """A partition from the strategy's `partition` argument: "uniform" or one layer count per stage.

    Raises ConfigurationError for fewer layers than stages, an unknown word, the wrong number of counts, a
    count below one, and counts whose sum is not num_layers.
    """
    _check_enough_layers(num_layers, num_stages)
    if isinstance(spec, str):
        if spec != "uniform":
            raise ConfigurationError(
                f'partition={spec!r} is not known; write "uniform" or a list of {num_stages} layer counts'
            )
        return make_uniform_partition(num_layers, num_stages)
    counts = tuple(spec)
    if len(counts) != num_stages:
        raise ConfigurationError(
            f"partition={list(counts)} has {len(counts)} counts, but there are {num_stages} stages "
            "(pipeline_parallel_size x num_chunks); write one count per stage"
        )
    partition = Partition(counts)
    if partition.num_layers != num_layers:
        example = list(make_uniform_partition(num_layers, num_stages).layer_counts)
        raise ConfigurationError(
            f"partition={list(counts)} adds up to {partition.num_layers} layers, but the module has "
            f"{num_layers}; for example {example} would fit"
        )
    return partition


def _check_enough_layers(num_layers: int, num_stages: int) -> None:
    assert num_stages >= 1, num_stages
    if num_layers < num_stages:
        raise ConfigurationError(
            f"{num_layers} layers cannot fill {num_stages} stages (pipeline_parallel_size x num_chunks); "
            f"use at most {num_layers} stages, that is a smaller pipeline_parallel_size or num_chunks, "
            "or a module with more layers"
        )
