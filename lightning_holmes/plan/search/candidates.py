"""The candidates of the search: parallel sizes, schedules, chunks and microbatches.

space = space_of(options, layout=layout)            # a run: the layout is fixed
space = SearchSpace(tensor=(1, 2, 4, 8))            # the plan command: sizes are searched, too
for set_up in make_set_ups(cost_model, space, left_out): set_up.runs
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.layer_cost import check_count
from lightning_holmes.plan.partition import PARTITION_NAMES
from lightning_holmes.plan.placement import is_plain, layout_of, make_placement
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.schedule import spec_of

PLAIN_SCHEDULES = ("1f1b", "eager_1f1b")
INTERLEAVED_SCHEDULES = ("eager_interleaved_1f1b", "interleaved_1f1b")
LAYERED_SCHEDULES = ("breadth_first",)
AUTO_SCHEDULES = (*PLAIN_SCHEDULES, *INTERLEAVED_SCHEDULES, *LAYERED_SCHEDULES)
_CHUNKS = (2, 3, 4)
_LAYERED_CHUNKS = (1, *_CHUNKS, 6, 8, 12, 16, 24, 32)
# fewer if other schedules are tried, too, so that a search stays short: one chunk is gpipe, and with many stages or microbatches the
# bubble is small anyway
_LAYERED_CHUNKS_BESIDE_OTHERS = (*_CHUNKS, 6, 8)
_LAYERED_STAGES, _LAYERED_PER_RANK = 32, 4
_MOST_PER_RANK = 16
_COUNTS_TRIED = 8
_SMALLEST_SIZES = 7  # microbatches of 1, 2, 4 ... 64 samples are tried if no larger ones fit


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The options that the search may choose from. None: any value that is possible.

    Attributes:
        layout: the devices of each rank, if fixed as in a run; it overrides the sizes.
        pipeline, tensor: values to try; tensor sizes above 1 need a module that calls parallelize_module.
        num_chunks: stages per rank, for schedules that run any number of chunks.
        num_microbatches: by default those of :func:`microbatch_counts`.
        partition: the name of a rule, or layer counts.
        is_settled: nothing is left to choose, so that a plan that does not fit the memory is taken, with a note.
    """

    layout: Layout | None = None
    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = AUTO_SCHEDULES
    num_chunks: tuple[int, ...] | None = None
    num_microbatches: tuple[int, ...] | None = None
    partition: str | tuple[int, ...] = "self_adapting"
    is_settled: bool = False
    runners_up: int = 5

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "num_chunks", "num_microbatches"):
            for value in getattr(self, name) or ():
                check_count(value, name)
        if isinstance(self.partition, str) and self.partition not in PARTITION_NAMES:
            known = ", ".join(f'"{name}"' for name in PARTITION_NAMES)
            raise ConfigurationError(f"partition={self.partition!r} is not known; write one of {known} or layer counts")


def space_of(options: Asked, *, interleaves: bool = True, splits: bool = False, **settings: Any) -> SearchSpace:
    """Make the SearchSpace of the choices that the strategy's arguments leave open, for a run and for the plan command.

    Args:
        interleaves: whether schedules of several stages per rank may be chosen if the arguments do not name one.
        splits: whether schedules that split backwards may.
        settings: other attributes of the SearchSpace.
    """
    settled = options.num_chunks
    by_hand = not isinstance(options.partition, str)
    schedules: tuple[str, ...] = PLAIN_SCHEDULES
    if options.schedule != "auto":
        schedules = (options.schedule,)
    elif settled == "auto" and (interleaves or by_hand):
        schedules = AUTO_SCHEDULES
    elif settled != "auto" and settled > 1:
        schedules = (*INTERLEAVED_SCHEDULES, *LAYERED_SCHEDULES)
    if options.schedule == "auto" and splits and settled in ("auto", 1):
        schedules += tuple(variant for name in PLAIN_SCHEDULES if (variant := spec_of(name).split_variant) is not None)
    settings["schedules"] = schedules
    if settled != "auto":
        settings["num_chunks"] = (settled,)
    if options.num_microbatches != "auto":
        settings["num_microbatches"] = (int(options.num_microbatches),)
    settings["partition"] = tuple(options.partition) if by_hand else options.partition
    return SearchSpace(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """The candidates of a layout; ``smaller``: candidates with smaller microbatches if none of ``runs`` fits."""

    runs: tuple[RunShape, ...]
    smaller: tuple[RunShape, ...]
    bound_s: float
    """A lower bound of the step: all work spread over all devices, without bubbles or waiting."""


def make_set_ups(cost_model: CostModel, space: SearchSpace, left_out: Counter[str]) -> list[SetUp]:
    """Make the set-ups that have candidates, the lowest bound first; ``left_out`` counts the reasons against other layouts."""
    layouts = _layouts(cost_model, space, left_out) if space.layout is None else [space.layout]
    found = []
    for layout in layouts:
        samples = cost_model.training.batch_samples // layout.data
        counts = space.num_microbatches or microbatch_counts(layout.pipeline, samples)
        more: tuple[int, ...] = ()
        if space.layout is None:
            counts = tuple(count for count in counts if count <= samples)
            if not counts and space.num_microbatches:
                left_out[
                    f"num_microbatches={min(space.num_microbatches)} is more than the {samples} samples of a replica"
                ] += 1
        if space.num_microbatches is None:  # and smaller microbatches, to try if those do not fit the memory
            powers = (samples >> power for power in range(_SMALLEST_SIZES) if samples % (1 << power) == 0)
            more = tuple(sorted(count for count in powers if count > _MOST_PER_RANK * layout.pipeline))
        runs, smaller = (tuple(_runs(cost_model, space, layout, samples, some)) for some in (counts, more))
        if runs:
            bound_s = min(_lower_bound(cost_model, run) for run in (*runs, *smaller))
            found.append(SetUp(runs=runs, smaller=smaller, bound_s=bound_s))
    return sorted(found, key=lambda set_up: set_up.bound_s)


def _layouts(cost_model: CostModel, space: SearchSpace, left_out: Counter[str]) -> Iterator[Layout]:
    devices, layers, batch = cost_model.num_devices, cost_model.model.num_layers, cost_model.training.batch_samples
    smallest_host = math.gcd(*(host.devices for host in cost_model.network.hosts))
    for pipeline in space.pipeline or [size for size in range(1, devices + 1) if devices % size == 0]:
        for tensor in space.tensor:
            if devices % (pipeline * tensor):
                left_out[f"pipeline x tensor does not divide {devices} devices"] += 1
            elif smallest_host % tensor:
                left_out["tensor-parallel groups would leave a host"] += 1
            elif pipeline > layers:
                left_out["more pipeline ranks than layers"] += 1
            elif batch % (data := devices // (pipeline * tensor)):
                left_out[f"the batch of {batch} cannot be sharded evenly over the replicas"] += 1
            else:
                yield _as_placed(cost_model.network.topology, Layout(pipeline=pipeline, tensor=tensor, data=data))


def _as_placed(topology: Topology, layout: Layout) -> Layout:
    """The layout with the devices that a run would give to each pipeline rank, if they are not in the order of the topology."""
    if is_plain(topology, layout.tensor * layout.data):
        return layout
    placement = make_placement(
        topology,
        world_size=layout.num_devices,
        pipeline_parallel_size=layout.pipeline,
        tensor_parallel_size=layout.tensor,
    )
    return layout_of(placement, topology)


def _runs(
    cost_model: CostModel, space: SearchSpace, layout: Layout, samples: int, counts: Sequence[int]
) -> Iterator[RunShape]:
    model = cost_model.model
    schedules = _schedules(space, layout.pipeline, model.num_layers, model.num_layers - len(set(model.forbidden_cuts)))
    for name, chunks in schedules:
        if spec_of(name).is_split and layout.tensor > 1:
            continue  # refused in a run
        for count in counts:
            if chunks > 1 and count < layout.pipeline and len(schedules) > 1 and not spec_of(name).is_layered:
                continue
            many = space.num_microbatches is None and count > _LAYERED_PER_RANK * layout.pipeline
            if many and spec_of(name).is_layered and len(space.schedules) > 1:
                continue
            yield RunShape(
                layout=layout,
                schedule=name,
                num_microbatches=count,
                microbatch_samples=-(-samples // count),
                num_chunks=chunks,
            )


def _schedules(space: SearchSpace, size: int, num_layers: int, most_stages: int) -> list[tuple[str, int]]:
    """(schedule, chunks per rank) to try. A schedule that is the only one asked for is kept even if it does not go with the layers: a later
    check reports that.

    Args:
        most_stages: the largest number of stages without forbidden split points.
    """
    settled = space.num_chunks
    alone = len(space.schedules) == 1
    given = None
    if not isinstance(space.partition, str) and settled is None:  # the layer counts imply the number of chunks
        given = max(1, len(space.partition) // size)
        settled = (given,)
    found: list[tuple[str, int]] = []
    for name in space.schedules:
        spec = spec_of(name)
        if spec.is_chunked and spec.num_chunks is not None:
            found += [(name, spec.num_chunks)] * (size > 1)
        elif spec.is_layered:
            open_ones = _LAYERED_CHUNKS if alone else _LAYERED_CHUNKS_BESIDE_OTHERS
            numbers = settled or (open_ones if size > 1 else (most_stages,))
            fitting = [number for number in numbers if size * number <= (num_layers if settled else most_stages)]
            if alone:
                fitting = fitting or [numbers[0]]
            else:
                fitting = [
                    number for number in fitting if number == 2 or (number > 1 and size * number <= _LAYERED_STAGES)
                ]
            found += [(name, number) for number in fitting]
        elif spec.is_interleaved:
            numbers = settled or _CHUNKS
            fitting = [number for number in numbers if number > 1 and size * number <= num_layers]
            if not fitting and (alone or (len(numbers) == 1 and numbers[0] > 1)):
                fitting = [numbers[0]]
            found += [(name, number) for number in fitting if size > 1]
        elif (given in (None, 1) and (size > 1 or name == space.schedules[0])) or alone:
            found.append((name, 1))
    return found


def microbatch_counts(size: int, batch_size: int) -> tuple[int, ...]:
    """Numbers of microbatches to try: up to _COUNTS_TRIED that divide the batch evenly, from one to sixteen per pipeline rank."""
    most = min(batch_size, _MOST_PER_RANK * size)
    counts = [count for count in range(size, most + 1) if batch_size % count == 0]
    if not counts:  # such as a batch smaller than the pipeline, or of a prime number of samples
        counts = sorted({min(batch_size, size * factor) for factor in (1, 2, 4)})
    while len(counts) > _COUNTS_TRIED:  # drop one of the two that are nearest in ratio
        ratios = [counts[index + 1] / counts[index] for index in range(len(counts) - 1)]
        del counts[ratios.index(min(ratios[1:-1])) if len(ratios) > 2 else 1]
    return tuple(counts)


def _lower_bound(cost_model: CostModel, run: RunShape) -> float:
    model = cost_model.microbatch_model(run.microbatch_samples)
    return run.num_microbatches * (model.forward + model.backward) / sum(cost_model.speeds(run.layout))
