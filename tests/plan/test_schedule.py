"""Schedules: their invariants, and the orders of papers, some written out by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from schedule_checks import stuck_where_computations_wait, validate_schedule

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.memory import stage_in_flight
from lightning_holmes.plan.schedule import (
    COMPUTE_OPS,
    RECV_OPS,
    SCHEDULE_NAMES,
    SEND_OPS,
    Action,
    Op,
    Schedule,
    make_schedule,
    max_in_flight,
)
from lightning_holmes.plan.simulator import StepCosts, simulate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    most_chunks = {"interleaved_1f1b": 4, "eager_interleaved_1f1b": 4, "zero_bubble_v": 2, "breadth_first": 4}.get(
        name, 1
    )
    is_layered = name == "breadth_first"
    return make_schedule(
        name,
        pipeline_parallel_size=draw(st.integers(2 if most_chunks > 1 and not is_layered else 1, 6)),
        num_microbatches=draw(st.integers(1, 13)),
        num_chunks=draw(st.integers(1 if is_layered else 2, most_chunks)) if most_chunks > 1 else 1,
        forward_only=draw(st.booleans()),
    )


def written(schedule: Schedule, *, without: tuple[Op, ...] = (Op.FETCH, Op.RELEASE)) -> list[str]:
    return [" ".join(str(action) for action in actions if action.op not in without) for actions in schedule.actions]


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
                consumer = Op.FORWARD if action.op is Op.RECV_ACTIVATION else schedule.gradient_op(action.stage)
                needed_by = computes.index(Action(consumer, action.stage, action.microbatch))
                assert num_before < needed_by or needed_by == 0


@given(schedules())
def test_no_rank_waits_for_ever_where_allocations_wait_for_the_device(schedule: Schedule) -> None:
    """The others have no such promise: their stages send long before the receiver computes."""
    stuck = stuck_where_computations_wait(schedule)
    assert not stuck or schedule.name not in ("gpipe", "1f1b", "eager_1f1b", "zero_bubble")


@given(schedules())
def test_sends_follow_their_computation_and_a_reduction_the_last_one_of_its_stage(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for before, action in itertools.pairwise(actions):
            if action.op is Op.SEND_ACTIVATION:
                assert before == Action(Op.FORWARD, action.stage, action.microbatch)
            if action.op is Op.SEND_GRADIENT:
                assert before == Action(schedule.gradient_op(action.stage), action.stage, action.microbatch)
        for stage in schedule.stages_of(rank):
            mine = [action for action in actions if action.stage == stage and action.op not in RECV_OPS]
            ends = ["RL"] if schedule.forward_only else ["R", "RL"]
            last = [str(action).removesuffix(str(stage)) for action in mine[-len(ends) :]]
            # if stages are released between uses, a stage that is needed sooner is fetched between the two
            assert last == ends or (schedule.name == "breadth_first" and last == ends[::-1])
            assert [action.op for action in mine].count(Op.REDUCE_GRADIENTS) == (not schedule.forward_only)


@given(schedules())
def test_parameters_are_fetched_one_stage_ahead(schedule: Schedule) -> None:
    for actions in schedule.actions:
        begun: list[
            int
        ] = []  # stages in the order of their first computation; where they are let go, of each after a pause
        pauses = schedule.name == "breadth_first"
        fetched: list[int] = []
        for action in actions:
            if action.op is Op.FETCH:
                fetched.append(action.stage)
                assert len(fetched) <= len(begun) + 2, "more than one stage ahead"
            elif action.op in COMPUTE_OPS and action.stage not in (begun[-1:] if pauses else begun):
                if pauses and len(begun) > 1 and begun[-2] == action.stage:
                    fetched.insert(len(begun), action.stage)  # it was kept while one other stage was computed
                begun.append(action.stage)
                assert fetched[: len(begun)] == begun
        assert fetched == begun


def test_breadth_first_by_hand() -> None:
    """Parameters of a stage are fetched for the forwards of all microbatches and, if more than one other stage came
    between, again for all backwards."""
    layered = make_schedule("breadth_first", pipeline_parallel_size=1, num_microbatches=2, num_chunks=3)
    assert written(layered, without=()) == [
        "FT0 FT1 F0.0 F0.1 RL0 FT2 F1.0 F1.1 F2.0 B2.0 F2.1 B2.1 RL2 FT0 R2 B1.0 B1.1 RL1 R1 B0.0 B0.1 R0 RL0"
    ]
    pipeline = make_schedule("breadth_first", pipeline_parallel_size=2, num_microbatches=2, num_chunks=2)
    assert written(pipeline, without=(*RECV_OPS, *SEND_OPS)) == [
        "FT0 FT2 F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 RL2 R2 B0.0 B0.1 R0 RL0",
        "FT1 FT3 F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 RL3 R3 B1.0 B1.1 R1 RL1",
    ]
    evaluation = make_schedule(
        "breadth_first", pipeline_parallel_size=1, num_microbatches=1, num_chunks=2, forward_only=True
    )
    assert written(evaluation, without=()) == ["FT0 FT1 F0.0 RL0 F1.0 RL1"]
    one = make_schedule("breadth_first", pipeline_parallel_size=1, num_microbatches=2, num_chunks=1)
    assert written(one, without=()) == ["FT0 F0.0 B0.0 F0.1 B0.1 R0 RL0"]
    with pytest.raises(ConfigurationError, match='use num_chunks=1, schedule="breadth_first"'):
        make_schedule("interleaved_1f1b", pipeline_parallel_size=1, num_microbatches=2, num_chunks=2)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_breadth_first_fetches_twice_reduces_once_and_holds_all(num_ranks: int, extra: int, num_chunks: int) -> None:
    """For any number of microbatches; bubble (P-1)/(M V) of the computing time (arXiv 2211.05953) for M >= P."""
    count = num_ranks + extra - 1
    schedule = make_schedule(
        "breadth_first", pipeline_parallel_size=num_ranks, num_microbatches=count, num_chunks=num_chunks
    )
    last = schedule.num_stages - 1
    for rank, actions in enumerate(schedule.actions):
        for stage in schedule.stages_of(rank):
            of_stage = [action.op for action in actions if action.stage == stage]
            kept = stage in schedule.stages_of(rank)[-2:]
            assert of_stage.count(Op.FETCH) == of_stage.count(Op.RELEASE) == (1 if kept else 2)
            assert of_stage.count(Op.REDUCE_GRADIENTS) == 1
        held = 0
        for action in actions:
            held += {Op.FETCH: 1, Op.RELEASE: -1}.get(action.op, 0)
            assert held <= 2
    assert stage_in_flight("breadth_first", num_ranks, count, num_chunks) == (count,) * last + (1,)
    costs = StepCosts.even(num_ranks * num_chunks)
    step_s, computing = simulate(schedule, costs).step_s, 3.0 * count * num_chunks
    assert step_s / computing - 1 == pytest.approx((num_ranks - 1) / (count * num_chunks))


@given(st.integers(1, 8), st.integers(1, 20))
def test_memory_of_schedules(num_ranks: int, num_microbatches: int) -> None:
    # arXiv 2401.10241: ZB-H1 holds no more than the first rank of 1F1B, and ZB-V as much in halves of stages
    most_of = {
        "1f1b": lambda rank: num_ranks - rank,
        "eager_1f1b": lambda rank: 2 * (num_ranks - rank) - 1,
        "gpipe": lambda rank: num_microbatches,
        "zero_bubble": lambda rank: num_ranks,
        "eager_zero_bubble": lambda rank: 2 * num_ranks - rank - 1,
    }
    sizes = {"pipeline_parallel_size": num_ranks, "num_microbatches": num_microbatches}
    for name, most in most_of.items():
        expected = tuple(min(num_microbatches, most(rank)) for rank in range(num_ranks))
        assert max_in_flight(make_schedule(name, **sizes)) == expected, name
    assert max_in_flight(make_schedule("gpipe", **sizes, forward_only=True)) == (0,) * num_ranks
    if num_ranks > 1:
        peaks = max_in_flight(make_schedule("zero_bubble_v", **sizes, num_chunks=2))
        assert all(peak <= 2 * num_ranks for peak in peaks)


def test_1f1b_by_hand() -> None:
    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    assert written(schedule) == [
        "F0.0 SA0.0 RG0.0 F0.1 SA0.1 B0.0 RG0.1 F0.2 SA0.2 RG0.2 B0.1 B0.2 R0",
        "RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 RA1.2 B1.1 SG1.1 F1.2 B1.2 SG1.2 R1",
    ]


def test_interleaved_has_megatrons_order() -> None:
    # Megatron-LM's table for 2 ranks, 2 chunks, 4 microbatches: groups of 2, warm-up 2*(2-r-1) + 2.
    schedule = make_schedule("interleaved_1f1b", pipeline_parallel_size=2, num_microbatches=4, num_chunks=2)
    computes = [" ".join(str(action) for action in actions if action.op in COMPUTE_OPS) for actions in schedule.actions]
    assert computes == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_zero_bubble_has_the_papers_order() -> None:
    # Qi et al., figure 3, top (ZB-H1), ranks 2 to 4 of 4: B there is I here; the first rank's B and W are one
    schedule = make_schedule("zero_bubble", pipeline_parallel_size=4, num_microbatches=8)
    order = [
        " ".join(f"{a.op.value}{a.microbatch + 1}" for a in row if a.op in COMPUTE_OPS) for row in schedule.actions
    ]
    assert order[3].startswith("F1 I1 F2 I2 F3 I3 F4 I4 W1 F5 I5 W2 F6 I6 W3")
    assert order[1].startswith("F1 F2 F3 I1 F4 I2 W1 F5 I3 W2 F6 I4 W3")


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("1f2b", (2, 2, 1), ["'1f2b'", "gpipe, 1f1b, eager_1f1b, interleaved_1f1b"]),
        ("zero_bubble", (2, 2, 2), ["num_chunks=2", "one chunk per rank"]),
        ("zero_bubble_v", (2, 2, 3), ["num_chunks=3", "2 chunks per rank"]),
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
    with refusal(*words):
        make_schedule(name, pipeline_parallel_size=sizes[0], num_microbatches=sizes[1], num_chunks=sizes[2])
