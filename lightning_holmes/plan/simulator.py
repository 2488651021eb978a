"""Simulator: runs the actions of a Schedule with predicted durations and returns a Timeline.

It runs the same lists of actions as the runner: a rank goes through its actions in order, computes as soon as the tensor
it waits for has arrived, starts sends without waiting, and reduces gradients at the REDUCE_GRADIENTS actions.

    timeline = simulate(make_schedule("1f1b", pipeline_parallel_size=4, num_microbatches=8), StepCosts.even(4))
    timeline.step_s         # (8 + 3) * 3.0: a forward takes 1 second, a backward 2, transfers no time

One replica is simulated. All replicas are assumed to run in lockstep, so that n replicas that send through one network card
each get an n-th of its bandwidth: the seconds per byte in StepCosts include it. Within the replica a card
serves transfers in the order in which they are started, one at a time in each direction.

Gradient reductions start with the last backward of their stage, layer by layer, and the rank waits for them at its end; on a
shared card, transfers go first.
Fetches of parameters run one after the other, concurrently with computation; a stage's first computation waits for its fetch.
If processors carry the bytes (sockets between hosts), each byte sent or received takes some of the rank's own time, unless the
rank waits anyway. Not modelled: unequal ranks within a data-parallel group (the slowest counts).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_holmes.plan.schedule import RECV_OPS, Op, Schedule
from lightning_holmes.plan.timeline import Span, SpanKind, Timeline


@dataclass(frozen=True, slots=True)
class Route:
    """The route from one rank to another: latency, and (network card, seconds per byte) for each card on it.

    carried: bytes that the processors at both ends carry for each byte of the tensor (see StepCosts.byte_s).
    """

    latency_s: float
    hops: tuple[tuple[str, float], ...]
    carried: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Predicted durations and sizes of one step. Tuples by stage or by pipeline rank.

    Attributes:
        forward_s, backward_s: by stage, for one microbatch.
        backward_input_s, backward_weight_s: by stage, the two parts of a split backward; half of backward_s each if left out.
        tensor_forward_s, tensor_backward_s: by stage, the part of forward_s and backward_s spent in tensor-parallel transfers.
        activation_bytes: by stage, its output for one microbatch; the output's gradient has the same size.
        routes: by (source rank, destination rank). Transfers take no time on a pair that is missing.
        message_s: seconds of the sender's own time to start a transfer.
        byte_s: by rank, seconds of its own time for each byte that it sends or receives (see Route.carried).
        fetch_s: by stage, seconds of a FETCH; a rank's fetches, and then also its reductions, run one at a time. fetch_own_s: by
            stage, the rank's own time for a fetch.
        reduce_s: by stage, its gradient reduction. reduce_parts: by stage, the number of parts (layers) of its reduction.
        reduce_cards: by stage, the network cards that its reduction uses.
        reduce_own_s, gather_own_s: by stage, the rank's own time to carry the bytes while the stage's gradients are reduced
            and its parameters gathered concurrently with computation.
        update_s, gather_s: by rank, the optimizer's step; the exposed part of the gathering of sharded parameters.
        static_bytes: by rank, parameters, gradients and optimizer states. held_bytes: by stage, activations of one microbatch.
        transient_bytes: by rank, additional bytes at the peak (unsharded stages).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...] = ()
    backward_weight_s: tuple[float, ...] = ()
    tensor_forward_s: tuple[float, ...] = ()
    tensor_backward_s: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    routes: Mapping[tuple[int, int], Route] = field(default_factory=dict)
    message_s: float = 0.0
    byte_s: tuple[float, ...] = ()
    fetch_s: tuple[float, ...] = ()
    fetch_own_s: tuple[float, ...] = ()
    reduce_s: tuple[float, ...] = ()
    reduce_own_s: tuple[float, ...] = ()
    gather_own_s: tuple[float, ...] = ()
    reduce_parts: tuple[int, ...] = ()
    reduce_cards: tuple[tuple[str, ...], ...] = ()
    update_s: tuple[float, ...] = ()
    gather_s: tuple[float, ...] = ()
    static_bytes: tuple[float, ...] = ()
    held_bytes: tuple[float, ...] = ()
    transient_bytes: tuple[float, ...] = ()

    @classmethod
    def even(cls, num_stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0) -> StepCosts:
        """Equal stages, with transfers that take no time."""
        return cls(forward_s=(forward_s,) * num_stages, backward_s=(backward_s,) * num_stages)


_CODES = {op: code for code, op in enumerate(op for op in Op if op not in RECV_OPS)}  # receives are only posted
_FORWARD, _BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT, *_OTHERS = _CODES.values()  # computations come first
_SEND_ACTIVATION, _SEND_GRADIENT, _FETCH, _RELEASE, _REDUCE = _OTHERS


def simulate(schedule: Schedule, costs: StepCosts) -> Timeline:
    """Simulate one step. forward_s and backward_s must have one entry per stage; other empty tuples count as zeros."""
    return _Simulation(schedule, costs).run()


class _Simulation:
    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        ranks, stages = schedule.pipeline_parallel_size, schedule.num_stages
        assert len(costs.forward_s) == len(costs.backward_s) == stages, (len(costs.forward_s), stages)
        self.schedule, self.costs = schedule, costs
        half = tuple(seconds / 2 for seconds in costs.backward_s)
        self.input_s, self.weight_s = costs.backward_input_s or half, costs.backward_weight_s or half
        assert len(self.input_s) == len(self.weight_s) == stages, (len(self.input_s), len(self.weight_s))
        self.rank_of = [schedule.rank_of(stage) for stage in range(stages)]
        self.num_ranks, self.num_stages, self.num_microbatches = ranks, stages, schedule.num_microbatches
        self.actions = [
            [(_CODES[action.op], action.stage, action.microbatch) for action in actions if action.op in _CODES]
            for actions in schedule.actions
        ]
        self.cursor = [0] * ranks
        self.clock = [0.0] * ranks
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        # by (_FORWARD or _BACKWARD, stage, microbatch): when the tensor arrived, and when it was sent
        self.arrived: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.waiting: dict[tuple[int, int, int], int] = {}
        self.queue: list[tuple[float, int, int, int, int, int]] = []
        self.free: dict[str, float] = {}
        self.sequence = 0
        self.waited = [0.0] * ranks
        self.reduced = [0.0] * ranks
        self.tensor = [0.0] * ranks
        self.last_backward: dict[int, tuple[float, float]] = {}
        self.held = [0.0] * ranks
        self.peak = [0.0] * ranks
        self.pending: list[list[int]] = [[] for _ in range(ranks)]
        self.fetched: dict[int, float] = {}  # by stage, when its parameters arrive
        self.fetching = [0.0] * ranks  # by rank, when its last started fetch (or reduction, with fetch_s) ends

    def run(self) -> Timeline:
        for rank in range(self.num_ranks):
            self._go_on(rank)
        self._transfer_all()
        for rank in range(self.num_ranks):
            assert self.cursor[rank] == len(self.actions[rank]), f"rank {rank} waits for ever"
            self._finish(rank)
        static, transient = self.costs.static_bytes, self.costs.transient_bytes
        peaks = tuple(
            self.peak[rank] + (static[rank] if static else 0.0) + (transient[rank] if transient else 0.0)
            for rank in range(self.num_ranks)
        )
        return Timeline(
            spans=tuple(tuple(sorted(spans, key=lambda span: span.start_s)) for spans in self.spans),
            step_s=max(self.clock),
            exposed_s={
                "pipeline": sum(self.waited),
                "data_parallel": sum(self.reduced),
                "tensor_parallel": sum(self.tensor),
            },
            peak_memory_bytes=peaks,
        )

    def _transfer_all(self) -> None:
        while self.queue:
            time, _, code, stage, microbatch, rank = heapq.heappop(self.queue)
            self._transfer(time, code, stage, microbatch, rank)

    def _go_on(self, rank: int) -> None:
        """Run a rank's actions until it has to wait for a tensor that has not been sent yet."""
        actions, costs, clock = self.actions[rank], self.costs, self.clock[rank]
        cursor = self.cursor[rank]
        while cursor < len(actions):
            code, stage, microbatch = actions[cursor]
            if code <= _BACKWARD_WEIGHT:
                own_s = 0.0
                come_s = self.fetched.pop(stage, 0.0)
                if come_s > clock:
                    self.reduced[rank] += come_s - clock
                    clock = come_s
                if self._waits(code, stage):
                    key = (min(code, _BACKWARD), stage, microbatch)
                    arrival = self.arrived.pop(key, None)
                    if arrival is None:
                        self._wait(key, rank, cursor, clock)
                        break
                    own_s = self._carrying_s(code == _FORWARD, stage, rank)
                    if arrival[0] > clock:
                        self.waited[rank] += arrival[0] - max(clock, arrival[1])
                        own_s = max(0.0, own_s - (arrival[0] - clock))
                        clock = arrival[0]
                start = clock
                clock += own_s
                if code == _FORWARD:
                    clock += costs.forward_s[stage]
                    if costs.gather_own_s and microbatch == 0:
                        clock += costs.gather_own_s[stage]
                    self.spans[rank].append(Span("forward", start, clock, stage, microbatch))
                    if costs.tensor_forward_s:
                        self.tensor[rank] += costs.tensor_forward_s[stage]
                    if costs.held_bytes:
                        self.held[rank] += costs.held_bytes[stage]
                        self.peak[rank] = max(self.peak[rank], self.held[rank])
                        if self.schedule.forward_only:
                            self.held[rank] -= costs.held_bytes[stage]
                elif code == _BACKWARD_INPUT:
                    clock += self.input_s[stage]
                    self.spans[rank].append(Span("backward_input", start, clock, stage, microbatch))
                    if costs.tensor_backward_s:
                        self.tensor[rank] += costs.tensor_backward_s[stage]
                else:
                    split = code == _BACKWARD_WEIGHT
                    clock += self.weight_s[stage] if split else costs.backward_s[stage]
                    kind: SpanKind = "backward_weight" if split else "backward"
                    self.spans[rank].append(Span(kind, start, clock, stage, microbatch))
                    self.last_backward[stage] = (start, clock)
                    if costs.tensor_backward_s and not split:
                        self.tensor[rank] += costs.tensor_backward_s[stage]
                    if costs.held_bytes:
                        self.held[rank] -= costs.held_bytes[stage]
            elif code == _REDUCE:
                clock = self._reduce(rank, stage, clock, cursor)
            elif code == _FETCH:
                clock = self._fetch(rank, stage, clock)
            elif code == _RELEASE:
                self.fetched.pop(stage, None)
            else:
                forward = code == _SEND_ACTIVATION
                clock += costs.message_s + self._carrying_s(forward, stage + 1 if forward else stage - 1, rank)
                if not self._send(clock, cursor, code, stage, microbatch, rank):
                    cursor += 1
                    break
            cursor += 1
        self.cursor[rank], self.clock[rank] = cursor, clock

    def _wait(self, key: tuple[int, int, int], rank: int, cursor: int, clock: float) -> None:
        """A rank waits, before the action at ``cursor``, for a tensor that has not been sent yet."""
        self.waiting[key] = rank

    def _send(self, clock: float, cursor: int, code: int, stage: int, microbatch: int, rank: int) -> bool:
        """Send; return whether the rank goes on meanwhile."""
        self._start(clock, code, stage, microbatch, rank)
        return True

    def _start(self, time: float, code: int, stage: int, microbatch: int, rank: int) -> None:
        """Queue a transfer that begins at ``time``."""
        self.sequence += 1
        heapq.heappush(self.queue, (time, self.sequence, code, stage, microbatch, rank))

    def _waits(self, code: int, stage: int) -> bool:
        """Whether a computation needs a tensor from another rank."""
        if code == _BACKWARD_WEIGHT:
            return False
        other = stage - 1 if code == _FORWARD else stage + 1
        return 0 <= other < self.num_stages and self.rank_of[other] != self.rank_of[stage]

    def _bytes(self, forward: bool, target: int) -> float:
        """Bytes of the activation (``forward``) or gradient that stage ``target`` receives."""
        sizes = self.costs.activation_bytes
        return sizes[target - 1 if forward else target] if sizes else 0.0

    def _carrying_s(self, forward: bool, target: int, rank: int) -> float:
        """Seconds of ``rank``'s own time for its end of the transfer to stage ``target``."""
        if not self.costs.byte_s:
            return 0.0
        route = self.costs.routes.get((self.rank_of[target - 1 if forward else target + 1], self.rank_of[target]))
        return 0.0 if route is None else self._bytes(forward, target) * route.carried * self.costs.byte_s[rank]

    def _transfer(self, time: float, code: int, stage: int, microbatch: int, source: int) -> None:
        """Transfer a tensor over the cards on its route, and resume the receiving rank if it waits."""
        forward = code == _SEND_ACTIVATION
        target = stage + 1 if forward else stage - 1
        rank = self.rank_of[target]
        route = self.costs.routes.get((source, rank))
        arrival = start = time
        if route is not None:
            num_bytes = self._bytes(forward, target)
            for card, _ in route.hops:
                start = max(start, self.free.get(card, 0.0))
            slowest = 0.0
            for card, seconds in route.hops:
                taken = num_bytes * seconds
                self.free[card] = start + taken
                slowest = max(slowest, taken)
            arrival = start + slowest + route.latency_s
        if arrival > time:
            self.spans[source].append(Span("transfer", start, arrival, stage, microbatch))
        key = (_FORWARD if forward else _BACKWARD, target, microbatch)
        self.arrived[key] = (arrival, time)
        self._arrive(key, rank, source)

    def _arrive(self, key: tuple[int, int, int], rank: int, source: int) -> None:
        """A tensor has arrived on a rank, which goes on if it waits for it."""
        if self.waiting.pop(key, None) is not None:
            self._go_on(rank)

    def _fetch(self, rank: int, stage: int, clock: float) -> float:
        """Fetch a stage's parameters after the rank's earlier fetches; return the rank's clock after its own work for it."""
        seconds = self.costs.fetch_s[stage] if self.costs.fetch_s else 0.0
        if seconds == 0:
            return clock
        start = max(clock, self.fetching[rank])
        self.fetching[rank] = self.fetched[stage] = start + seconds
        self.spans[rank].append(Span("gather", start, start + seconds, stage, -1))
        return clock + (self.costs.fetch_own_s[stage] if self.costs.fetch_own_s else 0.0)

    def _reduce(self, rank: int, stage: int, clock: float, cursor: int) -> float:
        """Start to reduce a stage's gradients; return the rank's clock after its own work for it."""
        if not self.costs.reduce_s or self.costs.reduce_s[stage] == 0:
            return clock
        if self.costs.fetch_s:
            start = max(clock, self.fetching[rank])
            self.fetching[rank] = start + self.costs.reduce_s[stage]
            self.spans[rank].append(Span("reduce", start, self.fetching[rank], stage, -1))
            return clock + (self.costs.reduce_own_s[stage] if self.costs.reduce_own_s else 0.0)
        self.pending[rank].append(stage)
        own_s = self.costs.reduce_own_s[stage] if self.costs.reduce_own_s else 0.0
        if own_s and all(code > _BACKWARD_WEIGHT for code, _, _ in self.actions[rank][cursor:]):
            # no computation follows: the rank carries the last part's bytes while it waits for the reduction
            own_s *= 1 - 1 / (self.costs.reduce_parts[stage] if self.costs.reduce_parts else 1)
        return clock + own_s

    def _finish(self, rank: int) -> None:
        """Add the remaining reductions, the optimizer's step, and the gathering of parameters."""
        costs, clock = self.costs, self.clock[rank]
        free = self.fetching[rank]
        for stage in sorted(self.pending[rank], key=lambda stage: self.last_backward[stage]):
            seconds = costs.reduce_s[stage]
            began, ended = self.last_backward[stage]
            parts = costs.reduce_parts[stage] if costs.reduce_parts else 1
            cards = costs.reduce_cards[stage] if costs.reduce_cards else ()
            # the first part is ready when the last layer's backward is done, the last part at the very end
            start = max([free, began + (ended - began) / parts, *(self.free.get(card, 0.0) for card in cards)])
            free = max(start + seconds, ended + seconds / parts)
            self.spans[rank].append(Span("reduce", start, free, stage, -1))
        if free > clock:
            self.reduced[rank] += free - clock
            clock = free
        for kind, by_rank in (("update", costs.update_s), ("gather", costs.gather_s)):
            seconds = by_rank[rank] if by_rank else 0.0
            if seconds:
                self.spans[rank].append(
                    Span("update" if kind == "update" else "gather", clock, clock + seconds, -1, -1)
                )
                clock += seconds
                if kind == "gather":
                    self.reduced[rank] += seconds
        self.clock[rank] = clock
