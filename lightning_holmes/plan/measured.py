"""Measured timelines: the events that the ranks of one pipeline recorded in a step, as a Timeline to draw beside the predicted one.

    timeline = make_measured_timeline([RankStep(rank=0, clock="a", ...), RankStep(rank=1, ...)])

It merges the ranks' events: hosts have different clocks, and the offsets between them are estimated from the transfers. Not
known: when a transfer arrived if no rank waited for it (its span ends with the call that started it), and the parts of a rank's
own work outside of the microbatches ("other": data, checks, logging, callbacks, starting transfers).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from lightning_holmes.plan.timeline import BESIDE_KINDS, Span, SpanKind, Timeline

EventKind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "wait_activation",
    "wait_gradient",
    "send_activation",
    "send_gradient",
    "wait",
    "reduce",
    "update",
    "bucket_reduce",
    "bucket_gather",
]
_WAITED_S = 20e-6  # receiving a tensor that has arrived takes up to this long, and is no wait
_SENDS = ("send_activation", "send_gradient")


class Event(NamedTuple):
    """An event that a rank recorded, in seconds of its own clock; stage and microbatch are -1 where they do not apply.

    wait_activation and wait_gradient belong to the stage that waits, send_activation and send_gradient to the stage that
    sends. reduce is the time the rank waited for its gradients; bucket_reduce and bucket_gather are the times in which a bucket's
    gradients were summed over the replicas and its parameters gathered, concurrently with the rank's own work.
    """

    kind: EventKind
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one pipeline rank. clock: the same string for ranks that read the same clock."""

    rank: int
    clock: str
    began_s: float
    ended_s: float
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.ended_s - self.began_s


def make_measured_timeline(steps: Sequence[RankStep]) -> Timeline:
    """Make the timeline of one step of one pipeline from the events of its ranks; ``steps``: by rank.

    Apart from transfers and buckets, which run concurrently, spans fill each rank's step without overlap: time without an event is "other".
    """
    ahead = clock_offsets(steps)
    moved = [_moved(step, ahead[step.rank]) for step in steps]
    zero = min(step.began_s for step in moved)
    sent: dict[tuple[str, int, int], float] = {}
    waits: dict[tuple[str, int, int], Event] = {}
    for step in moved:
        for event in step.events:
            if event.kind in _SENDS:
                sent[event.kind, event.stage, event.microbatch] = event.start_s
            elif event.kind in ("wait_activation", "wait_gradient"):
                waits[event.kind, event.stage, event.microbatch] = event
    rows, exposed, reduced = [], 0.0, 0.0
    for step in moved:
        row = []
        for event in step.events:
            start, end = event.start_s - zero, event.end_s - zero
            if event.kind in _SENDS:
                wait = waits.get(_received_as(event))
                if wait is not None and wait.end_s > event.end_s and wait.end_s - wait.start_s > _WAITED_S:
                    end = wait.end_s - zero
                row.append(Span("transfer", start, end, event.stage, event.microbatch))
                continue
            row.append(Span(_span_kind(event), start, end, event.stage, event.microbatch))
            if event.kind == "reduce":
                reduced += event.end_s - event.start_s
            origin = sent.get(_sent_as(event))
            if origin is not None:
                exposed += max(0.0, event.end_s - max(event.start_s, origin))
        row += _others(row, step.began_s - zero, step.ended_s - zero)
        rows.append(tuple(sorted(row, key=lambda span: span.start_s)))
    return Timeline(
        spans=tuple(rows),
        step_s=max(step.seconds for step in steps),
        exposed_s={"pipeline": exposed, "data_parallel": reduced, "tensor_parallel": 0.0},
        peak_memory_bytes=(0.0,) * len(steps),
        source="measured",
    )


def seconds_by_kind(step: RankStep) -> dict[str, float]:
    """Seconds of a rank's step in forward, backward, wait, reduce, update and other; they add up to the step. Both parts of
    a split backward count as backward."""
    found = dict.fromkeys(("forward", "backward", "wait", "reduce", "update", "other"), 0.0)
    for event in step.events:
        if event.kind not in (*_SENDS, *BESIDE_KINDS):
            kind = "backward" if event.kind.startswith("backward") else _span_kind(event)
            found[kind] += event.end_s - event.start_s
    found["other"] = step.seconds - sum(found.values())
    return found


def clock_offsets(steps: Sequence[RankStep]) -> dict[int, float]:
    """Return the seconds to add to each rank's clock to get the first rank's clock.

    A transfer from a to b cannot arrive before it was sent, so that the smallest difference between arrival and
    sending, in each direction, bounds the offset from both sides; the middle is taken (as NTP does).
    """
    ranks = len(steps)
    least: dict[tuple[int, int], float] = {}
    sent: dict[tuple[str, int, int], tuple[int, float]] = {
        (e.kind, e.stage, e.microbatch): (s.rank, e.start_s) for s in steps for e in s.events if e.kind in _SENDS
    }
    for step in steps:
        for event in step.events:
            origin = sent.get(_sent_as(event))
            if origin is not None:
                pair = origin[0], step.rank
                least[pair] = min(least.get(pair, float("inf")), event.end_s - origin[1])
    clocks = {step.rank: step.clock for step in steps}
    began = {step.rank: step.began_s for step in steps}
    first = steps[0].rank
    known = {first: 0.0}
    open_ranks = [first]
    while open_ranks:
        one = open_ranks.pop(0)
        for other in clocks:
            if other in known:
                continue
            if clocks[one] == clocks[other]:
                known[other] = known[one]
            elif (one, other) in least and (other, one) in least:
                known[other] = known[one] - (least[one, other] - least[other, one]) / 2
            else:
                continue
            open_ranks.append(other)
    for rank in clocks:
        if rank not in known:  # no shared clock and no transfers in both directions: assume that steps begin together
            known[rank] = known[first] + began[first] - began[rank]
    assert len(known) == ranks
    return known


def _moved(step: RankStep, seconds: float) -> RankStep:
    if seconds == 0.0:
        return step
    return RankStep(
        rank=step.rank,
        clock=step.clock,
        began_s=step.began_s + seconds,
        ended_s=step.ended_s + seconds,
        events=tuple(e._replace(start_s=e.start_s + seconds, end_s=e.end_s + seconds) for e in step.events),
    )


def _span_kind(event: Event) -> SpanKind:
    """The kind of the span of an event that is no send."""
    return cast("SpanKind", "wait" if event.kind.startswith("wait") else event.kind)


def _sent_as(event: Event) -> tuple[str, int, int]:
    """The key of the send that a wait is for."""
    if event.kind == "wait_activation":
        return "send_activation", event.stage - 1, event.microbatch
    if event.kind == "wait_gradient":
        return "send_gradient", event.stage + 1, event.microbatch
    return "", -1, -1


def _received_as(event: Event) -> tuple[str, int, int]:
    """The key of the wait that a send ends."""
    if event.kind == "send_activation":
        return "wait_activation", event.stage + 1, event.microbatch
    return "wait_gradient", event.stage - 1, event.microbatch


def _others(row: Sequence[Span], began: float, ended: float) -> list[Span]:
    """Spans of kind "other" for the gaps between the spans of a row."""
    taken = sorted((span.start_s, span.end_s) for span in row if span.kind not in BESIDE_KINDS)
    edges = [began, *itertools.chain.from_iterable(taken), ended]
    gaps = [(edges[index], edges[index + 1]) for index in range(0, len(edges), 2)]
    return [Span("other", start, end, -1, -1) for start, end in gaps if end > start]
