"""Validates a schedule.

validate_schedule(schedule)         # ValueError, naming the rank and the action, if it could go wrong
"""

from __future__ import annotations

from collections import Counter

from lightning_holmes.plan.schedule.action import COMPUTE_OPS, GRADIENT_OPS, RECV_OPS, SEND_OPS, WHOLE_BATCH, Action, Op
from lightning_holmes.plan.schedule.schedule import Schedule, receive_of
from lightning_holmes.plan.schedule.specs import spec_of
from lightning_holmes.plan.simulator import StepCosts, simulate


def last_op(schedule: Schedule, stage: int) -> Op:
    """The kind of action that ends a microbatch's work on a stage."""
    return Op.BACKWARD_WEIGHT if spec_of(schedule.name).splits_backward(stage) else Op.BACKWARD


def validate_schedule(schedule: Schedule) -> None:
    """Raise ValueError, naming the rank and the action, if the schedule is not valid.

    Checked: every action is present once, on its rank; receives come before and sends after their computation,
    a backward after its forward, a weight backward after its input backward, a reduction after all backwards of its
    stage, and a computation after the one of the same rank whose output it uses; each computation is between a fetch and the
    release of its stage; for each ordered pair of ranks the receives have the order of the sends; and there is no deadlock.
    """
    if len(schedule.actions) != schedule.pipeline_parallel_size:
        raise ValueError(f"{len(schedule.actions)} lists of actions for {schedule.pipeline_parallel_size} ranks")
    for rank, actions in enumerate(schedule.actions):
        _check_actions(schedule, rank, actions)
    sent: dict[tuple[int, int], list[Action]] = {}
    posted: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op in SEND_OPS:
                receive = receive_of(action)
                sent.setdefault((rank, schedule.rank_of(receive.stage)), []).append(receive)
            elif action.op in RECV_OPS:
                step = -1 if action.op is Op.RECV_ACTIVATION else 1
                posted.setdefault((schedule.rank_of(action.stage + step), rank), []).append(action)
    for (source, destination), receives in sent.items():
        for expected, found in zip(receives, posted[source, destination], strict=True):
            if expected != found:
                raise ValueError(f"rank {source} to rank {destination}: {found} is posted where {expected} is sent")
    simulate(schedule, StepCosts.even(schedule.num_stages))  # which no rank may wait in for ever


def stuck_where_computations_wait(schedule: Schedule) -> list[str]:
    """Return by rank the computation in which it waits for ever if a rank waits in each computation until all that it has sent is received
    there, and all that it has posted is sent, as it may where memory of the device is allocated. Receives are posted when a computation
    needs their tensors, with those before them from the same rank."""
    sent: set[Action] = set()
    posted: set[Action] = set()
    queued: dict[tuple[int, int], list[Action]] = {}  # by rank and source
    waits_for: list[list[tuple[Action, set[Action]]]] = [[] for _ in schedule.actions]
    places, began = [0 for _ in schedule.actions], [-1 for _ in schedule.actions]

    def begin(rank: int, compute: Action) -> None:
        kind = Op.RECV_ACTIVATION if compute.op is Op.FORWARD else Op.RECV_GRADIENT
        needed = Action(kind, compute.stage, compute.microbatch)
        for queue in (q for (of, _), q in queued.items() if of == rank and needed in q):
            while needed in queue and compute.op is not Op.BACKWARD_WEIGHT:
                posted.add(queue[0])
                waits_for[rank].append((queue.pop(0), sent))

    def advance(rank: int) -> bool:
        action = schedule.actions[rank][places[rank]]
        if action.op in RECV_OPS:
            source = schedule.rank_of(action.stage + (-1 if action.op is Op.RECV_ACTIVATION else 1))
            queued.setdefault((rank, source), []).append(action)
        elif action.op in SEND_OPS:
            sent.add(receive_of(action))
            waits_for[rank].append((receive_of(action), posted))
        elif action.op in COMPUTE_OPS:
            if began[rank] != places[rank]:
                began[rank] = places[rank]
                begin(rank, action)
                return True
            if not all(transfer in where for transfer, where in waits_for[rank]):
                return False
        places[rank] += 1
        return True

    def left() -> list[int]:
        return [rank for rank, actions in enumerate(schedule.actions) if places[rank] < len(actions)]

    while any(advance(rank) for rank in left()):
        pass
    return [f"rank {rank}: {schedule.actions[rank][places[rank]]}" for rank in left()]


def _check_actions(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    counts = Counter(action for action in actions if action.op not in (Op.FETCH, Op.RELEASE))
    for action in _expected(schedule, rank):
        if counts.pop(action, 0) != 1:
            raise ValueError(f"rank {rank}: {action} must stand once, not {actions.count(action)} times")
    if counts:
        raise ValueError(f"rank {rank}: {next(iter(counts))} does not belong here")
    done: set[Action] = set()
    for action in actions:
        for needed in _before(schedule, action):
            if needed not in done:
                raise ValueError(f"rank {rank}: {action} stands before {needed}")
        done.add(action)
    _check_residency(schedule, rank, actions)


def _check_residency(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    """Check that a stage's parameters are fetched before its computations and released after them, and that each fetch has a release."""
    held: set[int] = set()
    for action in actions:
        stage = action.stage
        if action.op is Op.FETCH:
            if stage in held or stage not in schedule.stages_of(rank) or action.microbatch != WHOLE_BATCH:
                raise ValueError(f"rank {rank}: {action} does not belong here")
            held.add(stage)
        elif stage not in held and (action.op in COMPUTE_OPS or action.op is Op.RELEASE):
            raise ValueError(f"rank {rank}: {action} stands where stage {stage} is not fetched")
        elif action.op is Op.RELEASE:
            held.discard(stage)
    if held:
        raise ValueError(f"rank {rank}: stage {min(held)} is never released")


def _expected(schedule: Schedule, rank: int) -> list[Action]:
    """All actions that a rank must have, except fetches and releases."""
    expected: list[Action] = []
    for stage in schedule.stages_of(rank):
        comes, goes = _crosses(schedule, stage - 1), _crosses(schedule, stage)
        ops = [Op.FORWARD]
        ops += [Op.RECV_ACTIVATION] if comes else []
        ops += [Op.SEND_ACTIVATION] if goes else []
        if not schedule.forward_only:
            ops += {schedule.gradient_op(stage), last_op(schedule, stage)}
            ops += [Op.SEND_GRADIENT] if comes else []
            ops += [Op.RECV_GRADIENT] if goes else []
            expected.append(Action(Op.REDUCE_GRADIENTS, stage, WHOLE_BATCH))
        expected += [Action(op, stage, m) for op in ops for m in range(schedule.num_microbatches)]
    return expected


def _crosses(schedule: Schedule, stage: int) -> bool:
    """Whether a stage and the next one are on different ranks."""
    return 0 <= stage < schedule.num_stages - 1 and schedule.rank_of(stage) != schedule.rank_of(stage + 1)


def _before(schedule: Schedule, action: Action) -> list[Action]:
    """The actions that must come before an action on its own rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        if _crosses(schedule, stage - 1):
            return [Action(Op.RECV_ACTIVATION, stage, microbatch)]
        return [Action(Op.FORWARD, stage - 1, microbatch)] if stage > 0 else []
    if action.op in GRADIENT_OPS:
        needed = [Action(Op.FORWARD, stage, microbatch)]
        if _crosses(schedule, stage):
            needed.append(Action(Op.RECV_GRADIENT, stage, microbatch))
        elif stage < schedule.num_stages - 1:
            needed.append(Action(schedule.gradient_op(stage + 1), stage + 1, microbatch))
        return needed
    if action.op is Op.BACKWARD_WEIGHT:
        return [Action(Op.BACKWARD_INPUT, stage, microbatch)]
    if action.op is Op.SEND_ACTIVATION:
        return [Action(Op.FORWARD, stage, microbatch)]
    if action.op is Op.SEND_GRADIENT:
        return [Action(schedule.gradient_op(stage), stage, microbatch)]
    if action.op is Op.REDUCE_GRADIENTS:
        return [Action(last_op(schedule, stage), stage, m) for m in range(schedule.num_microbatches)]
    return []
