"""The orders in which a pipeline rank computes. Plain data; specs.py says which schedule has which.

    shape = RankShape(rank=1, num_ranks=2, num_microbatches=3, stages=(1,), groups=(range(3),))
    [str(action) for action in zero_bubble(shape)]
    # ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "F1.2", "I1.2", "W1.1", "W1.2"]

Where a backward is split, BACKWARD_INPUT gives what the stage before waits for, and BACKWARD_WEIGHT, which nobody waits
for, fills what would be idle time. Stage 0 has nobody before it: its backward is never split.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_holmes.plan.schedule.action import Action, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """A pipeline rank, its stages, and the groups of microbatches that go through one of its chunks after another."""

    rank: int
    num_ranks: int
    num_microbatches: int
    stages: tuple[int, ...]
    groups: Sequence[range]

    @property
    def following(self) -> int:
        """Ranks after this one."""
        return self.num_ranks - self.rank - 1

    def forwards(self) -> list[Action]:
        """All forwards, group by group and chunk by chunk."""
        return [Action(Op.FORWARD, stage, m) for group in self.groups for stage in self.stages for m in group]

    def backwards(self) -> list[Action]:
        """All whole backwards, likewise, the last chunk first."""
        return [
            Action(Op.BACKWARD, stage, m) for group in self.groups for stage in reversed(self.stages) for m in group
        ]


def all_forwards_first(shape: RankShape) -> list[Action]:
    """GPipe."""
    return shape.forwards() + shape.backwards()


def breadth_first(shape: RankShape) -> list[Action]:
    """All microbatches through a stage before the next one, and back in reverse (arXiv 2211.05953).

    In the last stage of all each backward follows its forward at once: that ends no later, and holds what the head makes,
    which may be large, for one microbatch.
    """
    last = shape.num_ranks * len(shape.stages) - 1
    forwards, backwards = ([a for a in half if a.stage != last] for half in (shape.forwards(), shape.backwards()))
    turn = (Op.FORWARD, Op.BACKWARD) if last in shape.stages else ()
    return [*forwards, *(Action(op, last, m) for m in range(shape.num_microbatches) for op in turn), *backwards]


def in_flight_breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
    """All microbatches in every stage but the last of all, which holds one."""
    return (num_microbatches,) * (num_ranks * num_chunks - 1) + (1,)


def one_forward_one_backward(shape: RankShape, warm_up: int = 1) -> list[Action]:
    """So many forwards for each rank after this one, then one forward and one backward in turn."""
    return _in_turn(shape.forwards(), shape.backwards(), warm_up * shape.following)


def interleaved(shape: RankShape) -> list[Action]:
    """Megatron-LM's order for several chunks a rank."""
    warm_up = 2 * shape.following + (len(shape.stages) - 1) * len(shape.groups[0])
    return _in_turn(shape.forwards(), shape.backwards(), warm_up)


def in_flight_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int, warm_up: int = 1) -> tuple[int, ...]:
    """The microbatches that each stage holds: those of its warm-up, and one."""
    return tuple(min(num_microbatches, warm_up * (num_ranks - rank - 1) + 1) for rank in range(num_ranks))


def in_flight_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int = 1
) -> tuple[int, ...]:
    """Likewise, of groups of microbatches that each go through one chunk after another; exact for whole groups."""
    groups = microbatch_groups(num_microbatches, num_ranks, group_size)
    stages = [0] * (num_ranks * num_chunks)
    for rank in range(num_ranks):
        left = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * len(groups[0]) + 1
        for group, chunk in itertools.product(groups, range(num_chunks)):
            stages[chunk * num_ranks + rank] += min(max(left, 0), len(group))
            left -= len(group)
    return tuple(stages)


def microbatch_groups(num_microbatches: int, num_ranks: int, size: int) -> list[range]:
    """The groups of microbatches that go through one chunk after another; at least P in each, larger ones first.

    With groups of P (size 1) a rank needs a chunk's first microbatch back as soon as it has sent the last one of the chunk
    before, and waits for the transfers. Groups of 2P give them P computations of time.

    Megatron's order has groups of P and wants full ones. Groups that are a little larger hold a little more, and keep
    the bubble of full ones for any number of microbatches: a last group filled up with microbatches that do not exist
    costs up to a fifth of the step. Fewer than P are filled up and left out again at the end: an order without
    circles stays one when some microbatches are left out.
    """
    number = max(1, num_microbatches // (size * num_ranks))
    each, more = divmod(max(num_microbatches, num_ranks), number)
    sizes = [each + (index < more) for index in range(number)]
    return [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(number)]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> list[Action]:
    """So many forwards, then one forward and one backward in turn, then the backwards that are left."""
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_steady], strict=True):
        order += [forward, backward]
    return [*order, *backwards[num_steady:]]


def zero_bubble(shape: RankShape, warm_up: int = 1) -> list[Action]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose weight backwards lag by ``rank`` microbatches.

    The later a rank's first backward is its own next work rather than the next rank's answer, the more weight backwards it
    keeps for the end, when 1F1B idles. Every rank holds at most P microbatches, as the first rank of 1F1B does; with an
    eager warm-up rank r holds 2P - r - 1.
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

    A rank first fills with forwards, as many as 1F1B's first rank holds (2P of its half stages); then each forward of
    a chunk is followed by the same chunk's whole backward, so that the number held stays; at the end the input
    backwards run first. The pattern needs 2P - 1 microbatches; fewer are the same order with the others left out.
    """
    rank, num_ranks, stages = shape.rank, shape.num_ranks, shape.stages
    total = max(shape.num_microbatches, 2 * num_ranks - 1)
    order: list[Action] = []
    next_one = {(op, chunk): 0 for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for chunk in (0, 1)}

    def take(chunk: int, *ops: Op) -> None:
        for op in ops:
            microbatch = next_one[op, chunk]
            if microbatch >= total:
                continue
            next_one[op, chunk] += 1
            order.append(Action(op, stages[chunk], microbatch))

    whole = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    _repeat(2 * (num_ranks - rank) - 1, lambda: take(0, Op.FORWARD))
    for _ in range(rank):
        take(1, Op.FORWARD)
        take(0, Op.FORWARD)
    _repeat(num_ranks - rank, lambda: take(1, Op.FORWARD, *whole))
    while next_one[Op.FORWARD, 1] < total:
        take(0, Op.FORWARD, *whole)
        take(1, Op.FORWARD, *whole)
    for _ in range(rank):
        take(0, Op.BACKWARD_INPUT)
        take(1, Op.BACKWARD_INPUT)
    _repeat(num_ranks - rank, lambda: take(0, *whole))
    for chunk in (1, 0):
        _repeat(total - next_one[Op.BACKWARD_WEIGHT, chunk], lambda chunk=chunk: take(chunk, Op.BACKWARD_WEIGHT))  # type: ignore[misc]
    return _unsplit(order)


def _repeat(times: int, what: Callable[[], None]) -> None:
    for _ in range(times):
        what()


def _unsplit(order: list[Action]) -> list[Action]:
    """Stage 0's input backwards out, its weight backwards as whole ones: nobody waits for the gradient of its input."""
    whole = []
    for action in order:
        if action.stage > 0:
            whole.append(action)
        elif action.op is Op.BACKWARD_WEIGHT:
            whole.append(Action(Op.BACKWARD, 0, action.microbatch))
        elif action.op is Op.FORWARD:
            whole.append(action)
    return whole
