"""Partition: which layers each stage holds.

It owns the layer counts and their checks. The schedule decides which pipeline rank holds a stage (ScheduleSpec.rank_of).

    partition = make_partition("uniform", num_layers=10, num_stages=4)
    partition.layer_counts      # (2, 3, 3, 2)
    partition.layers_of(1)      # range(2, 5)

Two rules assign the layers: "uniform" by count, and "self_adapting" by costs and memory (self_adapting.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.self_adapting import Balance, solve

PARTITION_NAMES = ("self_adapting", "uniform")


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers of each stage, in order. layer_counts has one entry per stage. No run has a stage without layers, which make_partition refuses; a
    published plan that is predicted may have."""

    layer_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layer_counts:
            raise ConfigurationError("partition: there are no counts; give one per stage")
        for stage, count in enumerate(self.layer_counts):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise _wrong_count(self.layer_counts, stage)

    @property
    def num_layers(self) -> int:
        """The number of layers of all stages."""
        return sum(self.layer_counts)

    @property
    def num_stages(self) -> int:
        """The number of stages: pipeline ranks times chunks."""
        return len(self.layer_counts)

    @property
    def split_points(self) -> frozenset[int]:
        """The layers after which a stage ends and another begins."""
        return frozenset(end - 1 for end in itertools.accumulate(self.layer_counts[:-1]))

    def layers_of(self, stage: int) -> range:
        """The indices of the layers that a stage holds."""
        assert 0 <= stage < self.num_stages, stage
        return _ranges(self.layer_counts)[stage]

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        assert layer >= 0, layer
        return _stages(self.layer_counts)[layer]


@functools.lru_cache(maxsize=64)
def _ranges(layer_counts: tuple[int, ...]) -> tuple[range, ...]:
    """The layers of each stage. Cached, since a step asks for every layer."""
    ends = list(itertools.accumulate(layer_counts))
    return tuple(range(end - count, end) for end, count in zip(ends, layer_counts, strict=True))


@functools.lru_cache(maxsize=64)
def _stages(layer_counts: tuple[int, ...]) -> tuple[int, ...]:
    """The stage of each layer."""
    return tuple(stage for stage, count in enumerate(layer_counts) for _ in range(count))


def make_uniform_partition(num_layers: int, num_stages: int) -> Partition:
    """Make a partition with the same number of layers for every stage, as nearly as possible.

    A remainder of r layers goes to r stages, one each. The last stage never gets one: it also computes
    the output head and the loss, which cost more than a layer. The first stage gets one only if all middle
    stages do: it also has the embedding. Of the middle stages, later ones come first: with 1F1B, later stages
    hold fewer microbatches in memory.
    """
    _check_enough_layers(num_layers, num_stages)
    each, remainder = divmod(num_layers, num_stages)
    order = [*range(num_stages - 2, 0, -1), 0, num_stages - 1]
    extra = set(order[:remainder])
    return Partition(tuple(each + (stage in extra) for stage in range(num_stages)))


def make_partition(
    spec: str | Sequence[int], num_layers: int, num_stages: int, *, balance: Balance | None = None
) -> Partition:
    """Make a partition from the strategy's `partition` argument: a rule's name or one layer count per stage.

    Args:
        balance: costs and limits, for "self_adapting".

    Raises ConfigurationError for fewer layers than stages (with a rule), an unknown rule, a rule without the argument it needs, the
    wrong number of counts, a count below 1, and counts whose sum is not num_layers.
    """
    if isinstance(spec, str):
        _check_enough_layers(num_layers, num_stages)
        if spec == "self_adapting" and balance is not None:
            assert (balance.num_layers, balance.num_stages) == (num_layers, num_stages)
            return Partition(solve(balance))
        if spec == "self_adapting":
            raise ConfigurationError(
                'partition="self_adapting" needs the costs of the layers, which are not known here; write "uniform"'
            )
        if spec != "uniform":
            known = ", ".join(f'"{name}"' for name in PARTITION_NAMES)
            raise ConfigurationError(
                f"partition={spec!r} is not known; write one of {known} or a list of {num_stages} layer counts"
            )
        return make_uniform_partition(num_layers, num_stages)
    counts = tuple(spec)
    if len(counts) != num_stages:
        raise ConfigurationError(
            f"partition={list(counts)} has {len(counts)} counts, but there are {num_stages} stages "
            "(pipeline_parallel_size x num_chunks); write one count per stage"
        )
    partition = Partition(counts)
    if 0 in counts:
        raise _wrong_count(counts, counts.index(0))
    if partition.num_layers != num_layers:
        _check_enough_layers(num_layers, num_stages)
        example = list(make_uniform_partition(num_layers, num_stages).layer_counts)
        raise ConfigurationError(
            f"partition={list(counts)} adds up to {partition.num_layers} layers, but the module has "
            f"{num_layers}; for example {example} would fit"
        )
    return partition


def _wrong_count(counts: Sequence[Any], stage: int) -> ConfigurationError:
    return ConfigurationError(
        f"partition={list(counts)}: stage {stage} has {counts[stage]!r} layers; write a whole number, at least 1"
    )


def _check_enough_layers(num_layers: int, num_stages: int) -> None:
    assert num_stages >= 1, num_stages
    if num_layers < num_stages:
        raise ConfigurationError(
            f"{num_layers} layers cannot fill {num_stages} stages (pipeline_parallel_size x num_chunks); "
            f"use at most {num_layers} stages, that is a smaller pipeline_parallel_size or num_chunks, "
            "or a module with more layers"
        )
