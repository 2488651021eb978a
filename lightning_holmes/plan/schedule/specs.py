"""The registry of schedules: a ScheduleSpec defines everything that is specific to a schedule. To add a schedule, add an entry.

    spec_of("zero_bubble").splits_backward(stage=1)     # True
    spec_of("interleaved_1f1b").rank_of(5, size=4)      # 1: stages are placed in a loop
    spec_of("zero_bubble_v").rank_of(5, size=4)         # 2: in a V, down to the last rank and back up

    loop                               V
    rank 0: 0 4                        rank 0: 0 7
    rank 1: 1 5                        rank 1: 1 6
    rank 2: 2 6                        rank 2: 2 5
    rank 3: 3 7                        rank 3: 3 4

In a V the last rank passes its first stage's output to its second stage without a transfer, and the first rank holds
both ends of the model, so that a microbatch's backward begins where its forward did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.schedule import orders
from lightning_holmes.plan.schedule.action import Action
from lightning_holmes.plan.schedule.orders import RankShape

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "eager_interleaved_1f1b",
    "zero_bubble",
    "eager_zero_bubble",
    "zero_bubble_v",
    "breadth_first",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """The definition of a schedule.

    Attributes:
        name: the value of the strategy's ``schedule`` argument.
        description: in a line.
        order: returns the computations of a rank, in order.
        num_chunks: stages per rank; None: chosen by the user, at least two (at least one if ``is_layered``).
        is_v_shaped: stages are placed down the ranks and back up, instead of in a loop.
        is_layered: all microbatches pass one stage of a rank before they begin the next. A stage's parameters may be released
            between its forwards and its backwards, and one rank may hold all stages.
        is_split: backwards are split in two actions, except for stage 0, whose input needs no gradient.
        receives_ahead: the number of computations before the one that needs it at which a receive is posted.
        group_size: size of the groups of microbatches, as a multiple of the number of pipeline ranks (see microbatch_groups).
        split_variant: the name of the same schedule with split backwards.
        in_flight: (ranks, microbatches, chunks) -> the microbatches that each stage holds when its rank holds the most; None: count
            them from the actions.
    """

    name: str
    description: str
    order: Callable[[RankShape], list[Action]]
    num_chunks: int | None = 1
    is_v_shaped: bool = False
    is_layered: bool = False
    is_split: bool = False
    receives_ahead: int = 1
    group_size: int = 1
    split_variant: str | None = None
    in_flight: Callable[[int, int, int], tuple[int, ...]] | None = None

    @property
    def is_eager(self) -> bool:
        """Whether it leaves time for transfers, by a longer warm-up or larger groups of microbatches."""
        return self.receives_ahead > 1

    @property
    def is_chunked(self) -> bool:
        """Whether it can run several stages per rank."""
        return self.num_chunks != 1

    @property
    def is_interleaved(self) -> bool:
        """Whether it runs a number of stages per rank that the user chooses, at least two."""
        return self.num_chunks is None and not self.is_layered

    def chunks(self, asked: int | Literal["auto"]) -> int | Literal["auto"]:
        """The stages per rank: the schedule's own number if it is fixed above 1, otherwise ``asked``."""
        return self.num_chunks if self.num_chunks not in (None, 1) else asked

    def splits_backward(self, stage: int) -> bool:
        """Whether the backward of a stage is split into two actions."""
        return self.is_split and stage > 0

    def rank_of(self, stage: int, size: int) -> int:
        """The pipeline rank that holds a stage; ``size``: the number of pipeline ranks."""
        chunk, place = divmod(stage, size)
        return size - 1 - place if self.is_v_shaped and chunk % 2 else place

    def ranks_of(self, size: int, num_chunks: int) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return tuple(self.rank_of(stage, size) for stage in range(size * num_chunks))

    def stages_of(self, rank: int, size: int, num_chunks: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending, one per chunk."""
        back = size - 1 - rank if self.is_v_shaped else rank
        return tuple(chunk * size + (back if chunk % 2 else rank) for chunk in range(num_chunks))

    def compute_order(
        self, rank: int, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1, forward_only: bool = False
    ) -> list[Action]:
        """The computations of one rank, in order."""
        one_group = num_chunks == 1 or self.is_layered
        groups = orders.microbatch_groups(num_microbatches, num_ranks, self.group_size)
        shape = RankShape(
            rank=rank,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            stages=self.stages_of(rank, num_ranks, num_chunks),
            groups=(range(num_microbatches),) if one_group else groups,
        )
        order = shape.forwards() if forward_only else self.order(shape)
        return [action for action in order if action.microbatch < num_microbatches]


SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec(
            name="gpipe",
            description="all forwards, then all backwards",
            order=lambda shape: shape.forwards() + shape.backwards(),
            in_flight=lambda ranks, microbatches, chunks: (microbatches,) * (ranks * chunks),
        ),
        ScheduleSpec(
            name="1f1b",
            description="rank r of P runs min(M, P-r-1) forwards to warm up, then one forward and one backward in turn, so "
            "that at most P-r microbatches are in flight (PipeDream-flush, arXiv 2006.09503)",
            order=orders.one_forward_one_backward,
            split_variant="zero_bubble",
            in_flight=orders.in_flight_1f1b,
        ),
        ScheduleSpec(
            name="eager_1f1b",
            description="2(P-r-1) forwards to warm up, so that a transfer has a forward and a backward of time before anyone "
            "waits for it, at up to 2(P-r)-1 microbatches in flight (arXiv 2211.05322)",
            order=partial(orders.one_forward_one_backward, warm_up=2),
            receives_ahead=2,
            split_variant="eager_zero_bubble",
            in_flight=partial(orders.in_flight_1f1b, warm_up=2),
        ),
        ScheduleSpec(
            name="interleaved_1f1b",
            description="Megatron-LM's order (arXiv 2104.04473) for several chunks per rank",
            order=orders.interleaved,
            num_chunks=None,
            in_flight=orders.in_flight_interleaved,
        ),
        ScheduleSpec(
            name="eager_interleaved_1f1b",
            description="interleaved_1f1b with groups of 2P microbatches, which give transfers P computations of time",
            order=orders.interleaved,
            num_chunks=None,
            receives_ahead=2,
            group_size=2,
            in_flight=partial(orders.in_flight_interleaved, group_size=2),
        ),
        ScheduleSpec(
            name="zero_bubble",
            description="ZB-H1 (arXiv 2401.10241), 1f1b with a split backward",
            order=orders.zero_bubble,
            is_split=True,
        ),
        ScheduleSpec(
            name="eager_zero_bubble",
            description="zero_bubble with the longer warm-up of eager_1f1b",
            order=partial(orders.zero_bubble, warm_up=2),
            is_split=True,
            receives_ahead=2,
        ),
        ScheduleSpec(
            name="zero_bubble_v",
            description="ZB-V (arXiv 2401.10241), two chunks a rank in a V, with a split backward",
            order=orders.zero_bubble_v,
            num_chunks=2,
            is_v_shaped=True,
            is_split=True,
        ),
        ScheduleSpec(
            name="breadth_first",
            description="all microbatches through a chunk before the next one, backwards in reverse (arXiv 2211.05953); on one "
            "rank layered gradient accumulation (arXiv 2106.02679)",
            order=orders.breadth_first,
            num_chunks=None,
            is_layered=True,
            # the last stage of the pipeline holds one
            in_flight=lambda ranks, microbatches, chunks: (microbatches,) * (ranks * chunks - 1) + (1,),
        ),
    )
}
SCHEDULE_NAMES: tuple[str, ...] = tuple(SCHEDULES)


def spec_of(name: str) -> ScheduleSpec:
    """The spec of a schedule. Raises ConfigurationError for an unknown name."""
    if name not in SCHEDULES:
        raise ConfigurationError(f"schedule={name!r} is not known; use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
