"""Schedule: the list of actions of every pipeline rank for one batch. Plain data.

It owns where computing, sending and receiving stand; compute_order.py says in which order a rank computes, and
schedule_check.py what must hold. The runner and the simulator execute these actions as they stand; evaluation uses the
same lists without backward.

    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    [str(action) for action in schedule.actions[1]][:4]     # ["RA1.0", "F1.0", "RA1.1", "B1.0"]
    print(format_schedule(schedule))

What the actions mean, for a stage s and a microbatch m:

    RA s.m   RECV_ACTIVATION    post a receive for the input of s; F s.m waits for it
    F  s.m   FORWARD            compute
    SA s.m   SEND_ACTIVATION    start to send the output of s to stage s+1; nobody waits here
    RG s.m   RECV_GRADIENT      post a receive for the gradient of the output of s; B s.m or I s.m waits for it
    B  s.m   BACKWARD           compute
    I  s.m   BACKWARD_INPUT     compute the gradient of the input of s only
    W  s.m   BACKWARD_WEIGHT    compute what I left: the gradients of the parameters
    SG s.m   SEND_GRADIENT      start to send the gradient of the input of s to stage s-1
    FT s     FETCH              start to bring the parameters of s; its first computation waits for them
    RL s     RELEASE            they may go: no computation of s follows before the next FETCH
    R  s     REDUCE_GRADIENTS   all microbatches of s are done: start to take its gradients to whoever owns them

The last three belong to a whole stage; their microbatch is WHOLE_BATCH (-1). A stage is held from its first computation
to its last one, and fetched one stage ahead: before the first computation of the stage that this rank begins before it.

Stage s lives on the rank that stage_ranks.py says; between stages of one rank nothing is sent. Three properties hold for
every schedule, and validate_schedule checks them:

- No circle of waiting, provided that posting and sending do not block.
- For each ordered pair of ranks (source, destination) the receives are posted in the order of the sends,
  activations and gradients together: NCCL matches by order, not by tag. A posted NCCL receive holds up all
  that follows on its communicator, so each ordered pair needs a communicator of its own; one for both
  directions would deadlock.
- A receive is posted at least one computation before the one that needs it, in eager schedules two, so that the transfer
  runs beside these (except for the first computations of a rank, which have nothing before them): gloo and NCCL move
  nothing before both ends are there. And it is posted not earlier than this and the order ask for: its buffer takes
  memory from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    RECV_OPS,
    RELEASING_OPS,
    SEND_OPS,
    WHOLE_BATCH,
    Action,
    Op,
)
from lightning_holmes.plan.compute_order import EAGER, INTERLEAVED, compute_order, splits_backward
from lightning_holmes.plan.stage_ranks import V_SHAPED, rank_of_stage, ranks_of_stages, stages_of_rank

__all__ = [
    "COMPUTE_OPS",
    "GRADIENT_OPS",
    "RECV_OPS",
    "RELEASING_OPS",
    "SCHEDULE_NAMES",
    "SEND_OPS",
    "WHOLE_BATCH",
    "Action",
    "Op",
    "Schedule",
    "ScheduleName",
    "make_schedule",
    "max_in_flight",
    "receive_of",
]

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "eager_interleaved_1f1b",
    "zero_bubble",
    "eager_zero_bubble",
    "zero_bubble_v",
]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)
_CHUNKED = INTERLEAVED | V_SHAPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank for one batch of num_microbatches."""

    name: str
    pipeline_parallel_size: int
    num_chunks: int
    num_microbatches: int
    forward_only: bool
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Pipeline ranks times chunks."""
        return self.pipeline_parallel_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The pipeline rank on which a stage lives."""
        return rank_of_stage(self.name, stage, pipeline_parallel_size=self.pipeline_parallel_size)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending."""
        return stages_of_rank(
            self.name, rank, pipeline_parallel_size=self.pipeline_parallel_size, num_chunks=self.num_chunks
        )

    def gradient_op(self, stage: int) -> Op:
        """The kind of action that gives the gradient of a stage's input."""
        return Op.BACKWARD_INPUT if splits_backward(self.name, stage) else Op.BACKWARD

    def last_op(self, stage: int) -> Op:
        """The kind of action that ends a microbatch's work on a stage."""
        return Op.BACKWARD_WEIGHT if splits_backward(self.name, stage) else Op.BACKWARD


def make_schedule(
    name: str,
    *,
    pipeline_parallel_size: int,
    num_microbatches: int,
    num_chunks: int = 1,
    forward_only: bool = False,
) -> Schedule:
    """The schedule of that name. Cached: the runner asks once a batch.

    gpipe: all forwards, then all backwards. 1f1b: rank r runs min(M, P-r-1) forwards to warm up, then one
    forward and one backward in turn, so that at most P-r microbatches are in flight (PipeDream-flush,
    arXiv 2006.09503). eager_1f1b: 2(P-r-1) forwards to warm up, so that a transfer has a forward and a backward of time
    before anyone waits for it, at up to 2(P-r)-1 microbatches in flight (arXiv 2211.05322). interleaved_1f1b:
    Megatron-LM's order (arXiv 2104.04473) for several chunks per rank. zero_bubble: ZB-H1 (arXiv 2401.10241), 1F1B with a
    split backward; eager_zero_bubble: likewise with the longer warm-up. zero_bubble_v: ZB-V, two chunks a rank in a V.

    Raises ConfigurationError for an unknown name and for numbers that do not go together.
    """
    for what, value in (
        ("pipeline_parallel_size", pipeline_parallel_size),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{what}={value!r} is not allowed; write a whole number, at least 1")
    if name not in SCHEDULE_NAMES:
        raise ConfigurationError(f"schedule={name!r} is not known; use one of {', '.join(SCHEDULE_NAMES)}")
    if num_chunks > 1 and pipeline_parallel_size == 1:
        raise ConfigurationError(
            f"num_chunks={num_chunks} with pipeline_parallel_size=1: one rank has no one to interleave with; "
            "use num_chunks=1 or a larger pipeline_parallel_size"
        )
    if num_chunks > 1 and name not in _CHUNKED:
        raise ConfigurationError(
            f"schedule={name!r} runs one chunk per rank, but num_chunks={num_chunks}; "
            'use schedule="interleaved_1f1b" or num_chunks=1'
        )
    if num_chunks == 1 and name in INTERLEAVED:
        raise ConfigurationError(
            f'schedule="{name}" with num_chunks=1 has nothing to interleave; '
            'use num_chunks=2 or more, or schedule="1f1b"'
        )
    if num_chunks != 2 and name in V_SHAPED:
        raise ConfigurationError(
            f"schedule={name!r} runs two chunks per rank, down the ranks and back up, but num_chunks={num_chunks}; "
            "use num_chunks=2"
        )
    return _make_schedule(name, pipeline_parallel_size, num_microbatches, num_chunks, bool(forward_only))


@lru_cache(maxsize=128)
def _make_schedule(
    name: str, pipeline_parallel_size: int, num_microbatches: int, num_chunks: int, forward_only: bool
) -> Schedule:
    computes = [
        compute_order(
            name,
            rank,
            num_ranks=pipeline_parallel_size,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            forward_only=forward_only,
        )
        for rank in range(pipeline_parallel_size)
    ]
    ranks = ranks_of_stages(name, pipeline_parallel_size=pipeline_parallel_size, num_chunks=num_chunks)
    return Schedule(
        name=name,
        pipeline_parallel_size=pipeline_parallel_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        actions=_with_transfers(computes, ranks, forward_only, ahead=2 if name in EAGER else 1),
    )


def _with_transfers(
    computes: list[list[Action]], ranks: tuple[int, ...], forward_only: bool, *, ahead: int
) -> tuple[tuple[Action, ...], ...]:
    """Put sends after the computations, receives ahead of them, and around each stage's its fetch, release and reduction."""
    # What arrives at a rank from each source, in the order in which the source sends it.
    arriving: list[dict[int, list[Action]]] = [{} for _ in computes]
    for source, order in enumerate(computes):
        for compute in order:
            send = _send_after(compute, ranks)
            if send is not None:
                receive = receive_of(send)
                arriving[ranks[receive.stage]].setdefault(source, []).append(receive)

    lists: list[tuple[Action, ...]] = []
    for rank, order in enumerate(computes):
        # by what they wait for: a forward for its input, a whole or input backward for the gradient of its output
        position = {
            (compute.op is Op.FORWARD, compute.stage, compute.microbatch): index
            for index, compute in enumerate(order)
            if compute.op is not Op.BACKWARD_WEIGHT
        }
        posts: list[list[tuple[int, Action]]] = [[] for _ in order]  # before computation i, with their deadlines
        for receives in arriving[rank].values():
            deadline = len(order)
            for receive in reversed(receives):
                needed_by = position[receive.op is Op.RECV_ACTIVATION, receive.stage, receive.microbatch]
                deadline = min(deadline, needed_by)
                posts[max(deadline - ahead, 0)].append((deadline, receive))
        before, after = around_stages(order, forward_only)
        actions: list[Action] = []
        for index, (compute, posted) in enumerate(zip(order, posts, strict=True)):
            actions += before.get(index, ())
            # Reversed back to the order of each source; the sort is stable, so it only mixes the sources.
            posted.reverse()
            posted.sort(key=lambda entry: entry[0])
            actions += [receive for _, receive in posted]
            actions.append(compute)
            send = _send_after(compute, ranks)
            if send is not None:
                actions.append(send)
            actions += after.get(index, ())
        lists.append(tuple(actions))
    return tuple(lists)


def around_stages(
    order: list[Action], forward_only: bool
) -> tuple[dict[int, list[Action]], dict[int, tuple[Action, ...]]]:
    """What stands before and after the computations of a rank, by their places: fetches; reductions and releases."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, compute in enumerate(order):
        first.setdefault(compute.stage, index)
        last[compute.stage] = index
    ends = (Op.RELEASE,) if forward_only else (Op.REDUCE_GRADIENTS, Op.RELEASE)
    after = {index: tuple(Action(op, stage, WHOLE_BATCH) for op in ends) for stage, index in last.items()}
    before: dict[int, list[Action]] = {}
    begins = list(first.values())  # ascending
    for stage, ahead in zip(first, [*begins[:1], *begins], strict=False):
        before.setdefault(ahead, []).append(Action(Op.FETCH, stage, WHOLE_BATCH))
    return before, after


def _send_after(compute: Action, ranks: tuple[int, ...]) -> Action | None:
    """The send that follows a computation; none at the two ends of the pipeline, and none within a rank."""
    stage = compute.stage
    if compute.op is Op.FORWARD and stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
        return Action(Op.SEND_ACTIVATION, stage, compute.microbatch)
    if compute.op in GRADIENT_OPS and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return Action(Op.SEND_GRADIENT, stage, compute.microbatch)
    return None


def receive_of(send: Action) -> Action:
    """The receive, on the other rank, that takes what a send sends."""
    if send.op is Op.SEND_ACTIVATION:
        return Action(Op.RECV_ACTIVATION, send.stage + 1, send.microbatch)
    return Action(Op.RECV_GRADIENT, send.stage - 1, send.microbatch)


def max_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the largest number of forwards whose backward has not run yet; 0 if there is no backward.

    A chunk counts by itself: a microbatch that has passed two chunks of a rank counts twice. A split backward has run
    when its weight action has.
    """
    peaks = []
    for actions in schedule.actions:
        now = peak = 0
        for action in actions:
            now += 1 if action.op is Op.FORWARD else -1 if action.op in RELEASING_OPS else 0
            peak = max(peak, now)
        peaks.append(0 if schedule.forward_only else peak)
    return tuple(peaks)
