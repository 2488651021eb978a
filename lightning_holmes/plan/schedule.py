"""Schedule: the list of actions of every pipeline rank for one batch. Plain data.

It owns the order of computing, sending and receiving. The runner and the simulator execute these actions as
they stand; evaluation uses the same lists without backward.

    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    [str(action) for action in schedule.actions[1]][:4]     # ["RA1.0", "F1.0", "RA1.1", "B1.0"]
    print(format_schedule(schedule))

What the actions mean, for a stage s and a microbatch m:

    RA s.m   RECV_ACTIVATION    post a receive for the input of s; F s.m waits for it
    F  s.m   FORWARD            compute
    SA s.m   SEND_ACTIVATION    start to send the output of s to stage s+1; nobody waits here
    RG s.m   RECV_GRADIENT      post a receive for the gradient of the output of s; B s.m waits for it
    B  s.m   BACKWARD           compute
    SG s.m   SEND_GRADIENT      start to send the gradient of the input of s to stage s-1
    R  s     REDUCE_GRADIENTS   all microbatches of s are done; its microbatch is WHOLE_BATCH (-1)

Stage s lives on pipeline rank s % pipeline_parallel_size. Three properties hold for every schedule, and
validate_schedule checks them:

- No circle of waiting, provided that posting and sending do not block.
- For each ordered pair of ranks (source, destination) the receives are posted in the order of the sends,
  activations and gradients together: NCCL matches by order, not by tag. A posted NCCL receive holds up all
  that follows on its communicator, so each ordered pair needs a communicator of its own; one for both
  directions would deadlock.
- A receive is posted at least one computation before the one that needs it, so that the transfer runs beside
  that computation (except for the first computation of a rank, which has nothing before it), and not earlier
  than this and the order ask for: its buffer takes memory from then on.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from lightning_holmes.errors import ConfigurationError

SCHEDULE_NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b")
WHOLE_BATCH = -1
"""The microbatch of an action that belongs to no single microbatch (REDUCE_GRADIENTS)."""


class Op(enum.Enum):
    """The kinds of action; the value is the short form that str(action) uses."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    REDUCE_GRADIENTS = "R"


COMPUTE_OPS = frozenset({Op.FORWARD, Op.BACKWARD})
SEND_OPS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECV_OPS = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
_CONSUMER = {Op.RECV_ACTIVATION: Op.FORWARD, Op.RECV_GRADIENT: Op.BACKWARD}
_PRODUCER = {Op.SEND_ACTIVATION: Op.FORWARD, Op.SEND_GRADIENT: Op.BACKWARD}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        suffix = "" if self.microbatch == WHOLE_BATCH else f".{self.microbatch}"
        return f"{self.op.value}{self.stage}{suffix}"


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
        return stage % self.pipeline_parallel_size


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
    before anyone waits for it, at up to 2(P-r)-1 microbatches in flight (arXiv 2211.05322). interleaved_1f1b: Megatron-LM's order (arXiv 2104.04473) for several chunks per rank.

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
    if num_chunks > 1 and name != "interleaved_1f1b":
        raise ConfigurationError(
            f"schedule={name!r} runs one chunk per rank, but num_chunks={num_chunks}; "
            'use schedule="interleaved_1f1b" or num_chunks=1'
        )
    if num_chunks == 1 and name == "interleaved_1f1b":
        raise ConfigurationError(
            'schedule="interleaved_1f1b" with num_chunks=1 has nothing to interleave; '
            'use num_chunks=2 or more, or schedule="1f1b"'
        )
    return _make_schedule(name, pipeline_parallel_size, num_microbatches, num_chunks, bool(forward_only))


@lru_cache(maxsize=128)
def _make_schedule(
    name: str, pipeline_parallel_size: int, num_microbatches: int, num_chunks: int, forward_only: bool
) -> Schedule:
    computes = [
        _compute_order(name, rank, pipeline_parallel_size, num_microbatches, num_chunks, forward_only)
        for rank in range(pipeline_parallel_size)
    ]
    return Schedule(
        name=name,
        pipeline_parallel_size=pipeline_parallel_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        actions=_with_transfers(computes, pipeline_parallel_size * num_chunks, forward_only),
    )


def _compute_order(
    name: str, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, forward_only: bool
) -> list[Action]:
    """The forwards and backwards of one rank, in order."""
    # Megatron's interleaved order runs groups of num_ranks microbatches through one chunk after another, and
    # needs full groups. Here the last group is filled up with microbatches that do not exist, which are left
    # out again at the end. An order without circles stays one when some microbatches are left out.
    num_padded = num_microbatches if num_chunks == 1 else -(-num_microbatches // num_ranks) * num_ranks
    group_size = num_padded if num_chunks == 1 else num_ranks
    chunks = range(num_chunks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, num_padded, group_size):
        group = range(first, first + group_size)
        for chunk in chunks:
            forwards += [Action(Op.FORWARD, chunk * num_ranks + rank, microbatch) for microbatch in group]
        for chunk in reversed(chunks):
            backwards += [Action(Op.BACKWARD, chunk * num_ranks + rank, microbatch) for microbatch in group]
    if forward_only:
        backwards = []
    if forward_only or name == "gpipe":
        num_warmup = len(forwards)
    elif name == "1f1b":
        num_warmup = num_ranks - rank - 1
    elif name == "eager_1f1b":
        num_warmup = 2 * (num_ranks - rank - 1)
    else:
        num_warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks
    num_warmup = min(num_warmup, len(forwards))
    order = forwards[:num_warmup]
    num_steady = len(forwards) - num_warmup
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_steady], strict=True):
        order += [forward, backward]
    order += backwards[num_steady:]
    return [action for action in order if action.microbatch < num_microbatches]


def _with_transfers(
    computes: list[list[Action]], num_stages: int, forward_only: bool
) -> tuple[tuple[Action, ...], ...]:
    """Put sends behind the computations, receives ahead of them, and the reductions at the end."""
    num_ranks = len(computes)
    # What arrives at a rank from each source, in the order in which the source sends it.
    arriving: list[dict[int, list[Action]]] = [{} for _ in computes]
    for source, order in enumerate(computes):
        for compute in order:
            send = _send_after(compute, num_stages)
            if send is not None:
                receive = _receive_of(send)
                arriving[receive.stage % num_ranks].setdefault(source, []).append(receive)

    lists: list[tuple[Action, ...]] = []
    for rank, order in enumerate(computes):
        position = {compute: index for index, compute in enumerate(order)}
        posts: list[list[tuple[int, Action]]] = [[] for _ in order]  # before computation i, with their deadlines
        for receives in arriving[rank].values():
            deadline = len(order)
            for receive in reversed(receives):
                needed_by = position[Action(_CONSUMER[receive.op], receive.stage, receive.microbatch)]
                deadline = min(deadline, needed_by)
                posts[max(deadline - 1, 0)].append((deadline, receive))
        actions: list[Action] = []
        for compute, posted in zip(order, posts, strict=True):
            # Reversed back to the order of each source; the sort is stable, so it only mixes the sources.
            posted.reverse()
            posted.sort(key=lambda entry: entry[0])
            actions += [receive for _, receive in posted]
            actions.append(compute)
            send = _send_after(compute, num_stages)
            if send is not None:
                actions.append(send)
        if not forward_only:
            stages = range(rank, num_stages, num_ranks)
            actions += [Action(Op.REDUCE_GRADIENTS, stage, WHOLE_BATCH) for stage in reversed(stages)]
        lists.append(tuple(actions))
    return tuple(lists)


def _send_after(compute: Action, num_stages: int) -> Action | None:
    """The send that follows a computation; none at the two ends of the pipeline."""
    if compute.op is Op.FORWARD and compute.stage < num_stages - 1:
        return Action(Op.SEND_ACTIVATION, compute.stage, compute.microbatch)
    if compute.op is Op.BACKWARD and compute.stage > 0:
        return Action(Op.SEND_GRADIENT, compute.stage, compute.microbatch)
    return None


def _receive_of(send: Action) -> Action:
    """The receive, on the other rank, that takes what a send sends."""
    if send.op is Op.SEND_ACTIVATION:
        return Action(Op.RECV_ACTIVATION, send.stage + 1, send.microbatch)
    return Action(Op.RECV_GRADIENT, send.stage - 1, send.microbatch)


def validate_schedule(schedule: Schedule) -> None:
    """Raise ValueError, naming the rank and the action, if the schedule could go wrong.

    Checked: every action is there once, on its rank; receives come before and sends after their computation,
    a backward after its forward, a reduction after all backwards of its stage; for each ordered pair of ranks
    the receives have the order of the sends; and no rank waits for ever.
    """
    if len(schedule.actions) != schedule.pipeline_parallel_size:
        raise ValueError(
            f"{len(schedule.actions)} lists of actions for {schedule.pipeline_parallel_size} pipeline ranks"
        )
    for rank, actions in enumerate(schedule.actions):
        _check_actions(schedule, rank, actions)
    sent: dict[tuple[int, int], list[Action]] = {}
    posted: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op in SEND_OPS:
                receive = _receive_of(action)
                sent.setdefault((rank, schedule.rank_of(receive.stage)), []).append(receive)
            elif action.op in RECV_OPS:
                step = -1 if action.op is Op.RECV_ACTIVATION else 1
                posted.setdefault((schedule.rank_of(action.stage + step), rank), []).append(action)
    for (source, destination), receives in sent.items():
        for expected, found in zip(receives, posted[source, destination], strict=True):
            if expected != found:
                raise ValueError(f"rank {source} to rank {destination}: {found} is posted where {expected} is sent")
    _start_slots(schedule)


def _check_actions(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    expected: list[Action] = []
    last = schedule.num_stages - 1
    for stage in range(rank, schedule.num_stages, schedule.pipeline_parallel_size):
        ops = [Op.FORWARD]
        ops += [Op.RECV_ACTIVATION] if stage > 0 else []
        ops += [Op.SEND_ACTIVATION] if stage < last else []
        if not schedule.forward_only:
            ops += [Op.BACKWARD]
            ops += [Op.SEND_GRADIENT] if stage > 0 else []
            ops += [Op.RECV_GRADIENT] if stage < last else []
            expected.append(Action(Op.REDUCE_GRADIENTS, stage, WHOLE_BATCH))
        expected += [Action(op, stage, m) for op in ops for m in range(schedule.num_microbatches)]
    counts = Counter(actions)
    for action in expected:
        if counts.pop(action, 0) != 1:
            raise ValueError(f"rank {rank}: {action} must stand once, not {actions.count(action)} times")
    if counts:
        raise ValueError(f"rank {rank}: {next(iter(counts))} does not belong here")

    done: set[Action] = set()
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            before = [Action(Op.RECV_ACTIVATION, stage, microbatch)] if stage > 0 else []
        elif action.op is Op.BACKWARD:
            before = [Action(Op.FORWARD, stage, microbatch)]
            before += [Action(Op.RECV_GRADIENT, stage, microbatch)] if stage < last else []
        elif action.op in SEND_OPS:
            before = [Action(_PRODUCER[action.op], stage, microbatch)]
        elif action.op is Op.REDUCE_GRADIENTS:
            before = [Action(Op.BACKWARD, stage, m) for m in range(schedule.num_microbatches)]
        else:
            before = []
        for needed in before:
            if needed not in done:
                raise ValueError(f"rank {rank}: {action} stands before {needed}")
        done.add(action)


def _start_slots(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """For each rank the slot in which each computation starts: forward 1 slot, backward 2, transfers none.

    Sends and posts do not wait; a computation waits until what it needs was sent. Raises ValueError with the
    waiting actions if nobody can go on.
    """
    slots: list[list[tuple[int, Action]]] = [[] for _ in schedule.actions]
    clock = [0] * len(schedule.actions)
    cursor = [0] * len(schedule.actions)
    arrival: dict[Action, int] = {}  # of the receive actions
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while cursor[rank] < len(actions):
                action = actions[cursor[rank]]
                if action.op in COMPUTE_OPS:
                    receive = _receive_before(action, schedule.num_stages)
                    if receive is not None and receive not in arrival:
                        break
                    start = max(clock[rank], arrival[receive] if receive is not None else 0)
                    slots[rank].append((start, action))
                    clock[rank] = start + (1 if action.op is Op.FORWARD else 2)
                elif action.op in SEND_OPS:
                    arrival[_receive_of(action)] = clock[rank]
                cursor[rank] += 1
                moved = True
    waiting = [
        f"rank {rank} at {actions[cursor[rank]]}"
        for rank, actions in enumerate(schedule.actions)
        if cursor[rank] < len(actions)
    ]
    if waiting:
        raise ValueError(f"deadlock: {', '.join(waiting)} wait for each other")
    return slots


def _receive_before(compute: Action, num_stages: int) -> Action | None:
    """The receive that a computation waits for; none at the two ends of the pipeline."""
    if compute.op is Op.FORWARD and compute.stage > 0:
        return Action(Op.RECV_ACTIVATION, compute.stage, compute.microbatch)
    if compute.op is Op.BACKWARD and compute.stage < num_stages - 1:
        return Action(Op.RECV_GRADIENT, compute.stage, compute.microbatch)
    return None


def format_schedule(schedule: Schedule) -> str:
    """A picture in ASCII: a row per rank, a column per slot; a backward takes two ("B0 =="), "." is idle.

    With one chunk per rank the number is the microbatch; with several it is stage.microbatch. Transfers are
    drawn as if they took no time.
    """
    rows = _start_slots(schedule)
    length = max(start + (1 if action.op is Op.FORWARD else 2) for row in rows for start, action in row)
    cells = [["."] * length for _ in rows]
    for cell, row in zip(cells, rows, strict=True):
        for start, action in row:
            cell[start] = str(action) if schedule.num_chunks > 1 else f"{action.op.value}{action.microbatch}"
            if action.op is Op.BACKWARD:
                cell[start + 1] = "="
    width = max(len(text) for cell in cells for text in cell)
    label = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{label}} | "
        + " ".join(("=" * width if text == "=" else text.ljust(width)) for text in cell).rstrip()
        for rank, cell in enumerate(cells)
    )


def max_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the largest number of forwards whose backward has not run yet; 0 if there is no backward.

    A chunk counts by itself: a microbatch that has passed two chunks of a rank counts twice.
    """
    peaks = []
    for actions in schedule.actions:
        now = peak = 0
        for action in actions:
            now += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
            peak = max(peak, now)
        peaks.append(0 if schedule.forward_only else peak)
    return tuple(peaks)
