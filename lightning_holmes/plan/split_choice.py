"""Decides whether to split the backward, by simulating 1F1B and zero-bubble with measured stages. Plain data.

stage = StageSeconds(forward_s=1.0, backward_s=2.0, input_s=1.1, weight_s=1.1)
choose_split([stage] * 4, num_microbatches=8).schedule      # "zero_bubble": 29.8 s a step against 33 s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.plan.schedule import make_schedule, max_in_flight, spec_of
from lightning_holmes.plan.simulator import StepCosts, simulate

_WORTH_IT = 0.97  # a smaller gain is within the noise of timing a few microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Measurements of one microbatch on one stage.

    Attributes:
        forward_s, backward_s: the forward and the whole backward.
        input_s, weight_s: the two parts of the split backward.
        held_bytes: bytes that the forward leaves in the device's memory until the backward.
        room_bytes: bytes of the device's memory that were free at the peak.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    held_bytes: float = 0.0
    room_bytes: float = math.inf

    @property
    def ratio(self) -> float:
        """The time of the split backward divided by that of the whole backward."""
        return (self.input_s + self.weight_s) / self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """The chosen schedule and the reason."""

    schedule: str
    reason: str


def slowest(replicas: Sequence[StageSeconds | None]) -> StageSeconds | None:
    """A stage's measurements over all replicas, each the worst of them; None if one replica cannot split the stage."""
    known = [stage for stage in replicas if stage is not None]
    if len(known) < len(replicas) or not known:
        return None
    return StageSeconds(
        forward_s=max(stage.forward_s for stage in known),
        backward_s=max(stage.backward_s for stage in known),
        input_s=max(stage.input_s for stage in known),
        weight_s=max(stage.weight_s for stage in known),
        held_bytes=max(stage.held_bytes for stage in known),
        room_bytes=min(stage.room_bytes for stage in known),
    )


def choose_split(
    stages: Sequence[StageSeconds | None], *, num_microbatches: int, schedule: str = "1f1b"
) -> SplitChoice:
    """Choose the variant of ``schedule`` with a split backward if it fits the memory and the simulator finds it over 3 % faster.

    Transfers are left out, since they are the same in both. ``stages``: one per pipeline rank; None if its backward cannot be split.
    """
    other = spec_of(schedule).split_variant
    assert other is not None, schedule
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        where = list(stages).index(None)
        return SplitChoice(
            schedule=schedule,
            reason=f"{schedule}: the backward of stage {where} cannot be split; activation checkpointing, frozen before it, or "
            f"no backward was seen",
        )
    plain, split = (
        make_schedule(name, pipeline_parallel_size=len(known), num_microbatches=num_microbatches)
        for name in (schedule, other)
    )
    for rank, (before, after) in enumerate(zip(max_in_flight(plain), max_in_flight(split), strict=True)):
        more = (after - before) * known[rank].held_bytes
        if more > known[rank].room_bytes:
            return SplitChoice(
                schedule=schedule,
                reason=f"{schedule}: {other} would hold {after} microbatches on stage {rank} instead of {before}, "
                f"{more / 2**30:.1f} GiB more than its device has left",
            )
    costs = StepCosts(
        forward_s=tuple(stage.forward_s for stage in known),
        backward_s=tuple(stage.backward_s for stage in known),
        backward_input_s=tuple(stage.input_s for stage in known),
        backward_weight_s=tuple(stage.weight_s for stage in known),
    )
    plain_s, split_s = simulate(plain, costs).step_s, simulate(split, costs).step_s
    chosen = other if split_s < _WORTH_IT * plain_s else schedule
    ratios = ", ".join(f"{stage.ratio:.2f}" for stage in known[1:])
    return SplitChoice(
        schedule=chosen,
        reason=(
            f"{chosen}: by the stages as measured a step takes {plain_s:.3g} s with {schedule} and {split_s:.3g} s "
            f"with {other}; a split backward costs {ratios} of a whole one"
        ),
    )
