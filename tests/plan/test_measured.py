"""Measured timelines worked out by hand: the spans of a row, exposed communication, and clocks with an offset."""

import dataclasses
import itertools

import pytest

from lightning_holmes.plan.measured import Event, RankStep, clock_offsets, make_measured_timeline, seconds_by_kind
from lightning_holmes.plan.timeline import Timeline

# Rank 0: forward 0-1, sent at 1; rank 1 waits 0-2 (the way takes a second), forward 2-3, backward 3-5, sent at 5.
# The gradient arrives at 6; backward 6-8, reduced 8-9.
FIRST = RankStep(
    rank=0,
    clock="a",
    began_s=100.0,
    ended_s=110.0,
    events=(
        Event("forward", 100.0, 101.0, 0, 0),
        Event("send_activation", 101.0, 101.1, 0, 0),
        Event("wait_gradient", 101.1, 106.0, 0, 0),
        Event("backward", 106.0, 108.0, 0, 0),
        Event("reduce", 108.0, 109.0),
    ),
)
SECOND = RankStep(
    rank=1,
    clock="a",
    began_s=100.0,
    ended_s=110.0,
    events=(
        Event("wait_activation", 100.0, 102.0, 1, 0),
        Event("forward", 102.0, 103.0, 1, 0),
        Event("backward", 103.0, 105.0, 1, 0),
        Event("send_gradient", 105.0, 105.1, 1, 0),
        Event("wait", 105.1, 110.0),
    ),
)


def test_rows_are_filled_and_what_was_exposed_is_told_from_the_bubble() -> None:
    timeline = make_measured_timeline([FIRST, SECOND])
    assert timeline.step_s == 10.0 and timeline.source == "measured"
    for row in timeline.spans:
        spans = [span for span in row if span.kind != "transfer"]
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(10.0)
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in itertools.pairwise(spans))
    transfers = [span for row in timeline.spans for span in row if span.kind == "transfer"]
    assert [(span.start_s, span.end_s) for span in transfers] == [(1.0, 2.0), (5.0, 6.0)]
    # a second each way; the rest of the waiting time is bubble
    assert timeline.exposed_s["pipeline"] == pytest.approx(2.0)
    assert timeline.exposed_s["data_parallel"] == pytest.approx(1.0)
    assert Timeline.from_data(timeline.to_data()) == timeline
    seconds = seconds_by_kind(FIRST)
    assert sum(seconds.values()) == pytest.approx(10.0)
    assert seconds["wait"] == pytest.approx(4.9) and seconds["other"] == pytest.approx(1.1)


def test_buckets_run_beside_what_a_rank_does_and_take_none_of_its_time() -> None:
    summed = Event("bucket_reduce", 107.0, 108.5)
    with_bucket = dataclasses.replace(FIRST, events=(*FIRST.events, summed))
    assert seconds_by_kind(with_bucket) == seconds_by_kind(FIRST)
    plain, noted = (make_measured_timeline([step, SECOND]) for step in (FIRST, with_bucket))
    (span,) = set(noted.spans[0]) - set(plain.spans[0])
    assert span == ("bucket_reduce", 7.0, 8.5, -1, -1)
    assert noted.exposed_s == plain.exposed_s and noted.bubble_share == plain.bubble_share


@pytest.mark.parametrize("apart", [-7.25, 1e6])
def test_clocks_that_are_apart_are_joined_by_the_transfers(apart: float) -> None:
    events = tuple(e._replace(start_s=e.start_s + apart, end_s=e.end_s + apart) for e in SECOND.events)
    other = dataclasses.replace(
        SECOND, clock="b", began_s=SECOND.began_s + apart, ended_s=SECOND.ended_s + apart, events=events
    )
    assert clock_offsets([FIRST, other])[1] == pytest.approx(-apart)
    moved, here = make_measured_timeline([FIRST, other]), make_measured_timeline([FIRST, SECOND])
    for one, two in zip(moved.spans[1], here.spans[1], strict=True):
        assert (one.start_s, one.end_s) == pytest.approx((two.start_s, two.end_s), abs=1e-6)
