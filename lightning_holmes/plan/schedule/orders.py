"""The orders of a pipeline rank's computations. Plain data; specs.py assigns them to schedules.

    shape = RankShape(rank=1, num_ranks=2, num_microbatches=3, stages=(1,), groups=(range(3),))
    [str(action) for action in zero_bubble(shape)]
    # ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "F1.2", "I1.2", "W1.1", "W1.2"]

In a split backward, BACKWARD_INPUT computes the gradient that the previous stage waits for, and BACKWARD_WEIGHT, which no
other rank waits for, fills idle time. The backward of stage 0 is never split, since there is no previous stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.plan.schedule.action import Action, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """A pipeline rank, its stages, and its groups of microbatches: a group passes all chunks, one after the other, before the next group."""

    rank: int
    num_ranks: int
    num_microbatches: int
    stages: tuple[int, ...]
    groups: Sequence[range]

    @property
    def following(self) -> int:
        """The number of ranks after this one."""
        return self.num_ranks - self.rank - 1

    def forwards(self) -> list[Action]:
        """All forwards, group by group and chunk by chunk."""
        return [Action(Op.FORWARD, stage, m) for group in self.groups for stage in self.stages for m in group]

    def backwards(self) -> list[Action]:
        """All whole backwards, group by group and chunk by chunk, the last chunk first."""
        return [
            Action(Op.BACKWARD, stage, m) for group in self.groups for stage in reversed(self.stages) for m in group
        ]


def breadth_first(shape: RankShape) -> list[Action]:
    """All microbatches through a stage before the next one, and back in reverse (arXiv 2211.05953).

    In the last stage of the pipeline each backward directly follows its forward: the step takes no longer, and the head's
    output, which may be large, is held for one microbatch only.
    """
    last = shape.num_ranks * len(shape.stages) - 1
    forwards, backwards = ([a for a in half if a.stage != last] for half in (shape.forwards(), shape.backwards()))
    turn = (Op.FORWARD, Op.BACKWARD) if last in shape.stages else ()
    return [*forwards, *(Action(op, last, m) for m in range(shape.num_microbatches) for op in turn), *backwards]


def one_forward_one_backward(shape: RankShape, warm_up: int = 1) -> list[Action]:
    """1F1B: ``warm_up`` forwards for each rank after this one, then one forward and one backward in turn."""
    return _in_turn(shape.forwards(), shape.backwards(), warm_up * shape.following)


def interleaved(shape: RankShape) -> list[Action]:
    """Megatron-LM's order for several chunks a rank."""
    warm_up = 2 * shape.following + (len(shape.stages) - 1) * len(shape.groups[0])
    return _in_turn(shape.forwards(), shape.backwards(), warm_up)


def in_flight_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int, warm_up: int = 1) -> tuple[int, ...]:
    """The microbatches that each stage holds: those of its warm-up plus one."""
    return tuple(min(num_microbatches, warm_up * (num_ranks - rank - 1) + 1) for rank in range(num_ranks))


def in_flight_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int = 1
) -> tuple[int, ...]:
    """The microbatches that each stage holds under ``interleaved``; exact if all groups are full."""
    groups = microbatch_groups(num_microbatches, num_ranks, group_size)
    stages = [0] * (num_ranks * num_chunks)
    for rank in range(num_ranks):
        left = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * len(groups[0]) + 1
        for group, chunk in itertools.product(groups, range(num_chunks)):
            stages[chunk * num_ranks + rank] += min(max(left, 0), len(group))
            left -= len(group)
    return tuple(stages)


def microbatch_groups(num_microbatches: int, num_ranks: int, size: int) -> list[range]:
    """Divide microbatches into groups for interleaved schedules; at least P (num_ranks) in each, larger groups first.

    A group passes all chunks, one after the other, before the next group. With groups of P (size 1) a rank needs the first
    microbatch of a chunk as soon as it has sent the last one of the previous chunk, and waits for the transfers. Groups of 2P
    leave P computations of time for the transfers.

    Megatron's order has groups of exactly P. Slightly larger groups hold slightly more activations, and keep the bubble of full
    groups for any number of microbatches: padding the last group with microbatches that do not exist would cost up to a fifth
    of the step. Fewer than P microbatches are padded, and compute_order drops the padding: an order without deadlock
    stays free of deadlock if some microbatches are left out.
    """
    number = max(1, num_microbatches // (size * num_ranks))
    each, more = divmod(max(num_microbatches, num_ranks), number)
    sizes = [each + (index < more) for index in range(number)]
    return [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(number)]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> list[Action]:
    """num_warmup forwards, then one forward and one backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_steady], strict=True):
        order += [forward, backward]
    return [*order, *backwards[num_steady:]]


def zero_bubble(shape: RankShape, warm_up: int = 1) -> list[Action]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose weight backwards lag by ``rank`` microbatches.

    A rank keeps its last ``rank`` weight backwards for the end of the step, when 1F1B would be idle. Every rank holds at most P
    microbatches, as the first rank of 1F1B does; with an eager warm-up (2) rank r holds 2P - r - 1.
    """
    rank, num_microbatches = shape.rank, shape.num_microbatches
    if rank == 0:
        return one_forward_one_backward(shape, warm_up)
    microbatches = range(num_microbatches)
    inputs = [Action(Op.BACKWARD_INPUT, rank, microbatch) for microbatch in microbatches]
    order: list[Action] = []
    for action in _in_turn(shape.forwards(), inputs, warm_up * shape.following):
        order.append(action)
        if action.op is Op.BACKWARD_INPUT and action.microbatch >= rank:
            order.append(Action(Op.BACKWARD_WEIGHT, rank, action.microbatch - rank))
    left = range(max(0, num_microbatches - rank), num_microbatches)
    return order + [Action(Op.BACKWARD_WEIGHT, rank, microbatch) for microbatch in left]


def zero_bubble_v(shape: RankShape) -> list[Action]:
    """ZB-V (arXiv 2401.10241; V placements in 2405.15362): two chunks a rank, down and back up.

    A rank first runs forwards until it holds as much as 1F1B's first rank (2P of its half-size stages); then each forward of
    a chunk is followed by the same chunk's whole backward, so that the number held stays constant; at the end the input
    backwards run first. The pattern needs 2P - 1 microbatches; with fewer, the others are left out of the same order.
    """
    rank, num_ranks, stages = shape.rank, shape.num_ranks, shape.stages
    total = max(shape.num_microbatches, 2 * num_ranks - 1)
    order: list[Action] = []
    next_one = {(op, chunk): 0 for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for chunk in (0, 1)}

    def take(chunk: int, *ops: Op, times: int = 1) -> None:
        for op in ops * times:
            microbatch = next_one[op, chunk]
            if microbatch >= total:
                continue
            next_one[op, chunk] += 1
            order.append(Action(op, stages[chunk], microbatch))

    whole = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    take(0, Op.FORWARD, times=2 * (num_ranks - rank) - 1)
    for _ in range(rank):
        take(1, Op.FORWARD)
        take(0, Op.FORWARD)
    take(1, Op.FORWARD, *whole, times=num_ranks - rank)
    while next_one[Op.FORWARD, 1] < total:
        take(0, Op.FORWARD, *whole)
        take(1, Op.FORWARD, *whole)
    for _ in range(rank):
        take(0, Op.BACKWARD_INPUT)
        take(1, Op.BACKWARD_INPUT)
    take(0, *whole, times=num_ranks - rank)
    for chunk in (1, 0):
        take(chunk, Op.BACKWARD_WEIGHT, times=total - next_one[Op.BACKWARD_WEIGHT, chunk])
    return _unsplit(order)


def _unsplit(order: list[Action]) -> list[Action]:
    """Merge stage 0's split backwards into whole ones, at the place of the weight backwards: no rank needs the gradient of its input."""
    whole = []
    for action in order:
        if action.stage > 0 or action.op is Op.FORWARD:
            whole.append(action)
        elif action.op is Op.BACKWARD_WEIGHT:
            whole.append(Action(Op.BACKWARD, 0, action.microbatch))
    return whole
