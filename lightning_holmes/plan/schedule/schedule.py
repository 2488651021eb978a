"""Schedule: the list of actions of every pipeline rank for one batch, made from a compute order by adding transfers.

schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
[str(action) for action in schedule.actions[1]][:3]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.layer_cost import check_count
from lightning_holmes.plan.schedule.action import GRADIENT_OPS, RELEASING_OPS, WHOLE_BATCH, Action, Op
from lightning_holmes.plan.schedule.specs import ScheduleSpec, spec_of


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
        """The number of stages: pipeline ranks times chunks."""
        return self.pipeline_parallel_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return spec_of(self.name).rank_of(stage, self.pipeline_parallel_size)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending."""
        return spec_of(self.name).stages_of(rank, self.pipeline_parallel_size, self.num_chunks)

    def gradient_op(self, stage: int) -> Op:
        """The kind of action that computes the gradient of a stage's input."""
        return Op.BACKWARD_INPUT if spec_of(self.name).splits_backward(stage) else Op.BACKWARD


def make_schedule(
    name: str, *, pipeline_parallel_size: int, num_microbatches: int, num_chunks: int = 1, forward_only: bool = False
) -> Schedule:
    """Make the schedule of this name. Cached, since the runner calls it for every batch.

    ``spec_of(name).description`` describes each schedule.

    Raises ConfigurationError for an unknown name and for numbers that do not go with it.
    """
    for what, value in (
        ("pipeline_parallel_size", pipeline_parallel_size),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        check_count(value, what)
    spec = spec_of(name)
    if num_chunks > 1 and pipeline_parallel_size == 1 and not spec.is_layered:
        raise ConfigurationError(
            f"num_chunks={num_chunks} with pipeline_parallel_size=1: one rank has no one to interleave with; "
            'use num_chunks=1, schedule="breadth_first" or a larger pipeline_parallel_size'
        )
    if num_chunks > 1 and not spec.is_chunked:
        raise ConfigurationError(
            f"schedule={name!r} runs one chunk per rank, but num_chunks={num_chunks}; "
            'use schedule="interleaved_1f1b", "breadth_first" or num_chunks=1'
        )
    if num_chunks == 1 and spec.is_interleaved:
        raise ConfigurationError(
            f'schedule="{name}" with num_chunks=1 has nothing to interleave; '
            'use num_chunks=2 or more, or schedule="1f1b"'
        )
    if spec.num_chunks not in (None, num_chunks):
        raise ConfigurationError(
            f"schedule={name!r} runs {spec.num_chunks} chunks per rank, but "
            f"num_chunks={num_chunks}; use num_chunks={spec.num_chunks}"
        )
    return _make_schedule(spec, pipeline_parallel_size, num_microbatches, num_chunks, bool(forward_only))


@lru_cache(maxsize=128)
def _make_schedule(
    spec: ScheduleSpec, pipeline_parallel_size: int, num_microbatches: int, num_chunks: int, forward_only: bool
) -> Schedule:
    computes = [
        spec.compute_order(
            rank,
            num_ranks=pipeline_parallel_size,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            forward_only=forward_only,
        )
        for rank in range(pipeline_parallel_size)
    ]
    ranks = spec.ranks_of(pipeline_parallel_size, num_chunks)
    return Schedule(
        name=spec.name,
        pipeline_parallel_size=pipeline_parallel_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        actions=_with_transfers(computes, ranks, forward_only, ahead=spec.receives_ahead, lets_go=spec.is_layered),
    )


def _with_transfers(
    computes: list[list[Action]], ranks: tuple[int, ...], forward_only: bool, *, ahead: int, lets_go: bool
) -> tuple[tuple[Action, ...], ...]:
    """Insert sends after the computations, receives ahead of them, and fetches, releases and reductions around each stage's computations."""
    # the receives of each rank by source, in the order in which the source sends
    arriving: list[dict[int, list[Action]]] = [{} for _ in computes]
    for source, order in enumerate(computes):
        for compute in order:
            send = _send_after(compute, ranks)
            if send is not None:
                receive = receive_of(send)
                arriving[ranks[receive.stage]].setdefault(source, []).append(receive)

    lists: list[tuple[Action, ...]] = []
    for rank, order in enumerate(computes):
        # the place of each computation that can wait for a receive: forwards, and whole or input backwards
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
        before, after = around_stages(order, forward_only, lets_go=lets_go)
        actions: list[Action] = []
        for index, (compute, posted) in enumerate(zip(order, posts, strict=True)):
            actions += before.get(index, ())
            # restore the order of each source; the sort is stable, so that it only merges the sources
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
    order: list[Action], forward_only: bool, *, lets_go: bool = False
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Return the fetches, reductions and releases to insert before and after a rank's computations, by index of the computation.

    A stage is held from its first computation to its last one. With ``lets_go`` it is released before another stage begins, unless it is
    computed again directly after that one, so that at most two stages are held: the last two stages of the forwards are kept for their
    backwards. A reduction is then inserted after the fetch of a stage that is needed sooner.
    """
    last = {compute.stage: index for index, compute in enumerate(order)}
    held: list[tuple[int, int, int]] = []  # stage, first and last computation
    for index, compute in enumerate(order):
        if lets_go and held and held[-1][0] == compute.stage:
            held[-1] = held[-1][0], held[-1][1], index
        elif lets_go or all(stage != compute.stage for stage, _, _ in held):
            held.append((compute.stage, index, index if lets_go else last[compute.stage]))
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    ahead = held[0][1] if held else 0
    reductions: list[tuple[int, Action]] = []
    for place, (stage, begins, ends) in enumerate(held):
        if place < 2 or held[place - 2][0] != stage:
            before.setdefault(ahead, []).append(Action(Op.FETCH, stage, WHOLE_BATCH))
        ahead = begins
        if ends == last[stage] and not forward_only:
            reduction = Action(Op.REDUCE_GRADIENTS, stage, WHOLE_BATCH)
            if lets_go and ends + 1 < len(order):
                reductions.append((ends + 1, reduction))
            else:
                after.setdefault(ends, []).append(reduction)
        if place + 2 >= len(held) or held[place + 2][0] != stage:
            after.setdefault(ends, []).append(Action(Op.RELEASE, stage, WHOLE_BATCH))
    for index, reduction in reductions:
        before.setdefault(index, []).append(reduction)
    return before, after


def _send_after(compute: Action, ranks: tuple[int, ...]) -> Action | None:
    """The send that follows a computation; None at the ends of the pipeline and within a rank."""
    stage = compute.stage
    if compute.op is Op.FORWARD and stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
        return Action(Op.SEND_ACTIVATION, stage, compute.microbatch)
    if compute.op in GRADIENT_OPS and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return Action(Op.SEND_GRADIENT, stage, compute.microbatch)
    return None


def receive_of(send: Action) -> Action:
    """The receive on the other rank that matches a send."""
    if send.op is Op.SEND_ACTIVATION:
        return Action(Op.RECV_ACTIVATION, send.stage + 1, send.microbatch)
    return Action(Op.RECV_GRADIENT, send.stage - 1, send.microbatch)


def max_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the largest number of forwards whose backward has not run yet; 0 if there is no backward.

    Each chunk counts: a microbatch that has passed two chunks of a rank counts twice. A split backward has run
    when its BACKWARD_WEIGHT has run.
    """
    peaks = []
    for actions in schedule.actions:
        now = peak = 0
        for action in actions:
            now += 1 if action.op is Op.FORWARD else -1 if action.op in RELEASING_OPS else 0
            peak = max(peak, now)
        peaks.append(0 if schedule.forward_only else peak)
    return tuple(peaks)
