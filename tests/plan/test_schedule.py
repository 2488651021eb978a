"""Schedules: what they must hold, some written out by hand, and what the checker catches."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.schedule import (
    COMPUTE_OPS,
    RECV_OPS,
    SCHEDULE_NAMES,
    WHOLE_BATCH,
    Action,
    Op,
    Schedule,
    format_schedule,
    make_schedule,
    max_in_flight,
    validate_schedule,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    interleaved = name == "interleaved_1f1b"
    return make_schedule(
        name,
        pipeline_parallel_size=draw(st.integers(2 if interleaved else 1, 6)),
        num_microbatches=draw(st.integers(1, 13)),
        num_chunks=draw(st.integers(2, 4)) if interleaved else 1,
        forward_only=draw(st.booleans()),
    )


def written(schedule: Schedule) -> list[str]:
    return [" ".join(str(action) for action in actions) for actions in schedule.actions]


@given(schedules())
def test_valid_and_posted_ahead(schedule: Schedule) -> None:
    validate_schedule(schedule)
    for actions in schedule.actions:
        computes = [action for action in actions if action.op in COMPUTE_OPS]
        num_before = 0
        for action in actions:
            if action.op in COMPUTE_OPS:
                num_before += 1
            elif action.op in RECV_OPS:
                consumer = Op.FORWARD if action.op is Op.RECV_ACTIVATION else Op.BACKWARD
                needed_by = computes.index(Action(consumer, action.stage, action.microbatch))
                assert num_before < needed_by or needed_by == 0


@given(schedules())
def test_sends_follow_their_computation_and_reductions_come_last(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for before, action in itertools.pairwise(actions):
            if action.op is Op.SEND_ACTIVATION:
                assert before == Action(Op.FORWARD, action.stage, action.microbatch)
            if action.op is Op.SEND_GRADIENT:
                assert before == Action(Op.BACKWARD, action.stage, action.microbatch)
        stages = list(range(rank, schedule.num_stages, schedule.pipeline_parallel_size))
        reductions = [Action(Op.REDUCE_GRADIENTS, stage, WHOLE_BATCH) for stage in reversed(stages)]
        if schedule.forward_only:
            assert not [action for action in actions if action.op is Op.REDUCE_GRADIENTS]
        else:
            assert list(actions[-len(stages) :]) == reductions


@given(st.integers(1, 6), st.integers(1, 13))
def test_memory_of_1f1b_and_gpipe(num_ranks: int, num_microbatches: int) -> None:
    sizes = {"pipeline_parallel_size": num_ranks, "num_microbatches": num_microbatches}
    assert max_in_flight(make_schedule("1f1b", **sizes)) == tuple(
        min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)
    )
    assert max_in_flight(make_schedule("eager_1f1b", **sizes)) == tuple(
        min(num_microbatches, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)
    )
    assert max_in_flight(make_schedule("gpipe", **sizes)) == (num_microbatches,) * num_ranks
    assert max_in_flight(make_schedule("gpipe", **sizes, forward_only=True)) == (0,) * num_ranks


@given(st.integers(2, 6), st.integers(1, 13), st.integers(2, 4))
def test_memory_of_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    schedule = make_schedule(
        "interleaved_1f1b",
        pipeline_parallel_size=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
    )
    for rank, peak in enumerate(max_in_flight(schedule)):
        assert peak <= 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks + 1


def test_1f1b_by_hand() -> None:
    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    assert written(schedule) == [
        "F0.0 SA0.0 RG0.0 F0.1 SA0.1 B0.0 RG0.1 F0.2 SA0.2 RG0.2 B0.1 B0.2 R0",
        "RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 RA1.2 B1.1 SG1.1 F1.2 B1.2 SG1.2 R1",
    ]


def test_eager_1f1b_by_hand() -> None:
    """The first stage is two forwards ahead of what the last one sends back, not one."""
    schedule = make_schedule("eager_1f1b", pipeline_parallel_size=2, num_microbatches=4)
    assert written(schedule) == [
        "F0.0 SA0.0 F0.1 SA0.1 RG0.0 F0.2 SA0.2 B0.0 RG0.1 F0.3 SA0.3 RG0.2 B0.1 RG0.3 B0.2 B0.3 R0",
        "RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 RA1.2 B1.1 SG1.1 F1.2 RA1.3 B1.2 SG1.2 F1.3 B1.3 SG1.3 R1",
    ]


def test_gpipe_by_hand() -> None:
    schedule = make_schedule("gpipe", pipeline_parallel_size=2, num_microbatches=3)
    assert written(schedule) == [
        "F0.0 SA0.0 F0.1 SA0.1 RG0.0 F0.2 SA0.2 RG0.1 B0.0 RG0.2 B0.1 B0.2 R0",
        "RA1.0 RA1.1 F1.0 RA1.2 F1.1 F1.2 B1.0 SG1.0 B1.1 SG1.1 B1.2 SG1.2 R1",
    ]


def test_evaluation_by_hand() -> None:
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, pipeline_parallel_size=2, num_microbatches=3, forward_only=True)
        assert written(schedule) == [
            "F0.0 SA0.0 F0.1 SA0.1 F0.2 SA0.2",
            "RA1.0 RA1.1 F1.0 RA1.2 F1.1 F1.2",
        ]


def test_one_rank_sends_nothing() -> None:
    schedule = make_schedule("1f1b", pipeline_parallel_size=1, num_microbatches=2)
    assert written(schedule) == ["F0.0 B0.0 F0.1 B0.1 R0"]


def test_interleaved_has_megatrons_order() -> None:
    # Megatron-LM's table for 2 ranks, 2 chunks, 4 microbatches: groups of 2, warm-up 2*(2-r-1) + 2.
    schedule = make_schedule("interleaved_1f1b", pipeline_parallel_size=2, num_microbatches=4, num_chunks=2)
    computes = [" ".join(str(action) for action in actions if action.op in COMPUTE_OPS) for actions in schedule.actions]
    assert computes == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_picture() -> None:
    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    assert format_schedule(schedule).splitlines() == [
        "rank 0 | F0 F1 .  .  B0 == F2 B1 == .  B2 ==",
        "rank 1 | .  F0 B0 == F1 B1 == F2 B2 == .  .",
    ]
    schedule = make_schedule("interleaved_1f1b", pipeline_parallel_size=2, num_microbatches=1, num_chunks=2)
    assert format_schedule(schedule).splitlines() == [
        "rank 0 | F0.0 .    F2.0 .    .    .    B2.0 ==== .    .    B0.0 ====",
        "rank 1 | .    F1.0 .    F3.0 B3.0 ==== .    .    B1.0 ==== .    .",
    ]


def test_the_interleaved_bubble_is_smaller() -> None:
    # A chunk is drawn as long as a whole stage, so compare the idle share, not the length.
    def idle_share(picture: str) -> float:
        cells = [row.split("|")[1].split() for row in picture.splitlines()]
        length = max(len(row) for row in cells)
        return 1 - sum(cell != "." for row in cells for cell in row) / (length * len(cells))

    plain = make_schedule("1f1b", pipeline_parallel_size=4, num_microbatches=8)
    interleaved = make_schedule("interleaved_1f1b", pipeline_parallel_size=4, num_microbatches=8, num_chunks=2)
    assert idle_share(format_schedule(plain)) == pytest.approx(3 / 11)
    assert idle_share(format_schedule(interleaved)) < 0.2


def test_cached() -> None:
    first = make_schedule("1f1b", pipeline_parallel_size=4, num_microbatches=8)
    assert make_schedule("1f1b", num_microbatches=8, pipeline_parallel_size=4, num_chunks=1) is first


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("1f2b", (2, 2, 1), ["'1f2b'", "gpipe, 1f1b, eager_1f1b, interleaved_1f1b"]),
        ("auto", (2, 2, 1), ["'auto'"]),
        ("1f1b", (2, 0, 1), ["num_microbatches=0"]),
        ("1f1b", (0, 2, 1), ["pipeline_parallel_size=0"]),
        ("1f1b", (2, 2, -1), ["num_chunks=-1"]),
        ("1f1b", (2, 2.0, 1), ["num_microbatches=2.0"]),
        ("1f1b", (2, 2, 2), ["num_chunks=2", "interleaved_1f1b"]),
        ("interleaved_1f1b", (1, 2, 2), ["num_chunks=2", "pipeline_parallel_size=1"]),
        ("interleaved_1f1b", (2, 2, 1), ["num_chunks=1", "1f1b"]),
    ],
)
def test_refused(name: str, sizes: tuple[int, int, int], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_schedule(name, pipeline_parallel_size=sizes[0], num_microbatches=sizes[1], num_chunks=sizes[2])
    for word in words:
        assert word in str(caught.value)


def rewritten(schedule: Schedule, rank: int, text: str) -> Schedule:
    """The schedule with the actions of one rank replaced by those written in text."""
    known = {str(action): action for actions in schedule.actions for action in actions}
    actions = list(schedule.actions)
    actions[rank] = tuple(known[word] for word in text.split())
    return dataclasses.replace(schedule, actions=tuple(actions))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 R0", r"rank 0: B0\.1 must stand once, not 0"),
        ("F0.0 F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1 R0", r"F0\.0 must stand once, not 2"),
        ("F1.0 F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1 R0", r"F1\.0 does not belong"),
        ("F0.0 SA0.0 F0.1 SA0.1 B0.0 RG0.0 RG0.1 B0.1 R0", r"B0\.0 stands before RG0\.0"),
        ("SA0.0 F0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1 R0", r"SA0\.0 stands before F0\.0"),
        ("RG0.0 B0.0 F0.0 SA0.0 F0.1 SA0.1 RG0.1 B0.1 R0", r"B0\.0 stands before F0\.0"),
        ("F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 R0 RG0.1 B0.1", r"R0 stands before B0\.1"),
        (
            "F0.0 SA0.0 F0.1 SA0.1 RG0.1 RG0.0 B0.0 B0.1 R0",
            r"rank 1 to rank 0: RG0\.1 is posted where RG0\.0",
        ),
        (
            "F0.1 SA0.1 F0.0 SA0.0 RG0.0 B0.0 RG0.1 B0.1 R0",
            r"rank 0 to rank 1: RA1\.0 is posted where RA1\.1",
        ),
    ],
)
def test_the_checker_catches(text: str, message: str) -> None:
    schedule = make_schedule("gpipe", pipeline_parallel_size=2, num_microbatches=2)
    with pytest.raises(ValueError, match=message):
        validate_schedule(rewritten(schedule, 0, text))


def test_the_checker_catches_a_deadlock() -> None:
    # Rank 1 wants the second activation before it gives back the first gradient; rank 0 wants the reverse.
    schedule = make_schedule("gpipe", pipeline_parallel_size=2, num_microbatches=2)
    circle = rewritten(schedule, 0, "F0.0 SA0.0 RG0.0 RG0.1 B0.0 F0.1 SA0.1 B0.1 R0")
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at B0\.0, rank 1 at F1\.1"):
        validate_schedule(circle)


def test_actions_print_shortly() -> None:
    assert str(Action(Op.FORWARD, 0, 3)) == "F0.3"
    assert str(Action(Op.REDUCE_GRADIENTS, 2, WHOLE_BATCH)) == "R2"
