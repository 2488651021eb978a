"""The order in which a pipeline rank computes: what tells one schedule from another. Plain data.

    [str(action) for action in compute_order("zero_bubble", 1, num_ranks=2, num_microbatches=3)]
    # ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "F1.2", "I1.2", "W1.1", "W1.2"]

Where a backward is split, BACKWARD_INPUT gives what the stage before waits for, and BACKWARD_WEIGHT, which nobody waits
for, fills what would be idle time. Stage 0 has nobody before it: its backward is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_holmes.plan.action import Action, Op
from lightning_holmes.plan.stage_ranks import stages_of_rank

SPLITTING = frozenset({"zero_bubble", "eager_zero_bubble", "zero_bubble_v"})
"""The schedules whose backwards are split, except for stage 0."""
EAGER = frozenset({"eager_1f1b", "eager_zero_bubble", "eager_interleaved_1f1b"})
"""The schedules that give transfers time: by a longer warm-up, or larger groups of microbatches."""
INTERLEAVED = frozenset({"interleaved_1f1b", "eager_interleaved_1f1b"})
"""The schedules with as many chunks a rank as are asked for, round and round."""


def splits_backward(schedule: str, stage: int) -> bool:
    """Whether the backward of a stage is two actions."""
    return schedule in SPLITTING and stage > 0


def compute_order(
    name: str,
    rank: int,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    forward_only: bool = False,
) -> list[Action]:
    """The computations of one rank, in order."""
    following = num_ranks - rank - 1
    if name in ("zero_bubble", "eager_zero_bubble") and not forward_only:
        return _zero_bubble(rank, num_microbatches, 2 * following if name in EAGER else following)
    if name == "zero_bubble_v" and not forward_only:
        return _zero_bubble_v(rank, num_ranks, num_microbatches)
    stages = stages_of_rank(name, rank, pipeline_parallel_size=num_ranks, num_chunks=num_chunks)
    # one chunk: all microbatches are one group
    groups = [range(num_microbatches)] if num_chunks == 1 else microbatch_groups(name, num_microbatches, num_ranks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for group in groups:
        for stage in stages:
            forwards += [Action(Op.FORWARD, stage, microbatch) for microbatch in group]
        for stage in reversed(stages):
            backwards += [Action(Op.BACKWARD, stage, microbatch) for microbatch in group]
    if forward_only:
        return [action for action in forwards if action.microbatch < num_microbatches]
    if name == "gpipe":
        num_warmup = len(forwards)
    elif name == "1f1b":
        num_warmup = following
    elif name == "eager_1f1b":
        num_warmup = 2 * following
    else:
        num_warmup = 2 * following + (num_chunks - 1) * len(groups[0])
    order = _in_turn(forwards, backwards, num_warmup)
    return [action for action in order if action.microbatch < num_microbatches]


def microbatch_groups(name: str, num_microbatches: int, num_ranks: int) -> list[range]:
    """The groups of microbatches that go through one chunk after another; at least P in each, larger ones first.

    With groups of P a rank needs a chunk's first microbatch back as soon as it has sent the last one of the chunk before,
    and waits for the transfers. Groups of 2P give them P computations of time.

    Megatron's order has groups of P and wants full ones. Groups that are a little larger hold a little more, and keep
    the bubble of full ones for any number of microbatches: a last group filled up with microbatches that do not exist
    costs up to a fifth of the step. Fewer than P are filled up and left out again at the end: an order without
    circles stays one when some microbatches are left out.
    """
    number = max(1, num_microbatches // (2 * num_ranks if name in EAGER else num_ranks))
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


def _zero_bubble(rank: int, num_microbatches: int, num_warmup: int) -> list[Action]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose weight backwards lag by ``rank`` microbatches.

    The later a rank's first backward is its own next work rather than the next rank's answer, the more weight backwards it
    keeps for the end, when 1F1B idles. Every rank holds at most P microbatches, as the first rank of 1F1B does; with an
    eager warm-up rank r holds 2P - r - 1.
    """
    microbatches = range(num_microbatches)
    forwards = [Action(Op.FORWARD, rank, microbatch) for microbatch in microbatches]
    if rank == 0:
        return _in_turn(forwards, [Action(Op.BACKWARD, 0, m) for m in microbatches], num_warmup)
    inputs = [Action(Op.BACKWARD_INPUT, rank, microbatch) for microbatch in microbatches]
    order: list[Action] = []
    for action in _in_turn(forwards, inputs, num_warmup):
        order.append(action)
        if action.op is Op.BACKWARD_INPUT and action.microbatch >= rank:
            order.append(Action(Op.BACKWARD_WEIGHT, rank, action.microbatch - rank))
    left = range(max(0, num_microbatches - rank), num_microbatches)
    return order + [Action(Op.BACKWARD_WEIGHT, rank, microbatch) for microbatch in left]


def _zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-V (arXiv 2401.10241; V placements in 2405.15362): two chunks a rank, down and back up.

    A rank first fills with forwards, as many as 1F1B's first rank holds (2P of its half stages); then each forward of
    a chunk is followed by the same chunk's whole backward, so that the number held stays; at the end the input
    backwards run first. The pattern needs 2P - 1 microbatches; fewer are the same order with the others left out.
    """
    stages = stages_of_rank("zero_bubble_v", rank, pipeline_parallel_size=num_ranks, num_chunks=2)
    total = max(num_microbatches, 2 * num_ranks - 1)
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
    return _unsplit([action for action in order if action.microbatch < num_microbatches])


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
