"""Simulated steps: solved by hand, compared with closed forms, and large ones with a bound on the work per action."""

import dataclasses

import pytest
from blocking_sends import simulate_blocking
from counting import count_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_holmes.plan.schedule import make_schedule
from lightning_holmes.plan.simulator import Route, StepCosts, simulate


def run(name: str, costs: StepCosts, microbatches: int, *, ranks: int, chunks: int = 1, forward_only: bool = False):
    schedule = make_schedule(
        name, pipeline_parallel_size=ranks, num_microbatches=microbatches, num_chunks=chunks, forward_only=forward_only
    )
    return simulate(schedule, costs)


seconds = st.floats(0.01, 5.0)


@given(st.integers(1, 8), st.integers(1, 20), seconds, seconds)
@settings(max_examples=150, deadline=None)
def test_bubble_of_1f1b_and_gpipe(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    # GPipe (arXiv 1811.06965) and PipeDream-flush (2006.09503): (P-1)/(M+P-1) of the step
    for name in ("1f1b", "gpipe"):
        timeline = run(name, StepCosts.even(ranks, forward_s=forward, backward_s=backward), microbatches, ranks=ranks)
        assert timeline.step_s == pytest.approx((microbatches + ranks - 1) * (forward + backward))
        assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(st.integers(2, 20), seconds, st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_eager_1f1b_hides_transfers_that_1f1b_waits_for(microbatches: int, forward: float, part: float) -> None:
    """Two stages, by hand: transfers no longer than a forward cost time only at the two ends; 1f1b also waits for two
    transfers for every second microbatch."""
    transfer = part * forward
    routes = {(a, b): Route(0.0, ((f"card {a}", transfer),)) for a, b in ((0, 1), (1, 0))}
    even = StepCosts.even(2, forward_s=forward, backward_s=2 * forward)
    costs = dataclasses.replace(even, activation_bytes=(1.0, 1.0), routes=routes)
    ends = (microbatches + 1) * 3 * forward + 2 * transfer
    assert run("eager_1f1b", costs, microbatches, ranks=2).step_s == pytest.approx(ends)
    split = dataclasses.replace(costs, backward_input_s=(forward,) * 2, backward_weight_s=(forward,) * 2)
    assert run("eager_zero_bubble", split, microbatches, ranks=2).step_s == pytest.approx(ends - 2 * forward)
    waits = (microbatches - 1) // 2
    assert run("1f1b", costs, microbatches, ranks=2).step_s == pytest.approx(ends + 2 * waits * transfer)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "eager_interleaved_1f1b"])
@given(st.integers(2, 6), st.integers(0, 20), st.integers(2, 4), seconds)
@settings(max_examples=100, deadline=None)
def test_bubble_of_interleaved(name: str, ranks: int, more: int, chunks: int, forward: float) -> None:
    # Megatron-LM (arXiv 2104.04473, 2.2): 1/V of the bubble; there M must be a multiple of P, here be P at least
    microbatches = ranks + more
    costs = StepCosts.even(ranks * chunks, forward_s=forward, backward_s=2 * forward)
    timeline = run(name, costs, microbatches, ranks=ranks, chunks=chunks)
    assert timeline.step_s == pytest.approx((chunks * microbatches + ranks - 1) * 3 * forward)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))


@given(st.integers(2, 6), st.integers(1, 24), st.integers(1, 4), seconds, seconds)
@settings(max_examples=100, deadline=None)
def test_bubble_of_breadth_first(ranks: int, microbatches: int, chunks: int, forward: float, backward: float) -> None:
    # Lamy-Poirier (arXiv 2211.05953): (P-1)/(V M) of the time of computing, for M of P at least; with fewer each further chunk waits
    # for the microbatches that there are not. All microbatches of a rank are held, but in the last stage
    costs = StepCosts.even(ranks * chunks, forward_s=forward, backward_s=backward)
    timeline = run("breadth_first", costs, microbatches, ranks=ranks, chunks=chunks)
    waits = ranks - 1 + (chunks - 1) * max(0, ranks - microbatches)
    assert timeline.step_s == pytest.approx((chunks * microbatches + waits) * (forward + backward))
    bubble = timeline.bubble_share / (1 - timeline.bubble_share)
    assert bubble == pytest.approx(waits / (chunks * microbatches))


@given(st.integers(1, 8), st.integers(0, 12), seconds, seconds, seconds)
@settings(max_examples=150, deadline=None)
def test_bubble_of_zero_bubble(ranks: int, more: int, forward: float, into: float, weight: float) -> None:
    # Qi et al. (arXiv 2401.10241, table 2): ZB-H1 idles (P-1)(F + B - W) where no part is longer than another fills
    weight = min(weight, into, forward)
    microbatches = 2 * ranks - 1 + more
    costs = StepCosts(
        forward_s=(forward,) * ranks,
        backward_s=(into + weight,) * ranks,
        backward_input_s=(into,) * ranks,
        backward_weight_s=(weight,) * ranks,
    )
    whole = forward + into + weight
    step_s = run("zero_bubble", costs, microbatches, ranks=ranks).step_s
    assert step_s == pytest.approx(microbatches * whole + (ranks - 1) * (forward + into - weight))
    assert step_s < run("1f1b", costs, microbatches, ranks=ranks).step_s or ranks == 1


def test_two_stages_by_hand() -> None:
    # F 1, B 2; a transfer takes 3 s on one card a direction.
    #   rank 0: F0 0-1, F1 1-2                        B0 10-12, B1 13-15
    #   rank 1:         F0 4-5, B0 5-7, F1 7-8, B1 8-10
    # The activations are under way from 1 to 4 and 4 to 7, the gradients from 7 to 10 and 10 to 13.
    route = Route(0.0, (("card", 3.0),))
    back = Route(0.0, (("other card", 3.0),))
    costs = StepCosts(
        forward_s=(1, 1), backward_s=(2, 2), activation_bytes=(1, 1), routes={(0, 1): route, (1, 0): back}
    )
    timeline = run("1f1b", costs, 2, ranks=2)
    at = {(rank, s.kind, s.microbatch): (s.start_s, s.end_s) for rank, row in enumerate(timeline.spans) for s in row}
    assert at[1, "forward", 0] == (4, 5)
    assert at[1, "backward", 0] == (5, 7)
    assert at[1, "forward", 1] == (7, 8)  # its input came through the same card, from 4 to 7
    assert at[0, "transfer", 1] == (4, 7)
    assert at[0, "backward", 0] == (10, 12)
    assert at[0, "backward", 1] == (13, 15)
    assert timeline.step_s == 15
    # rank 1 waited 1-4 for its first input, rank 0 waited 7-10 and 12-13
    assert timeline.exposed_s["pipeline"] == pytest.approx(3 + 3 + 1)
    assert timeline.bubble_share == pytest.approx((30 - 12 - 7) / 30)


def test_a_shared_card_serves_one_at_a_time_and_latency_does_not_occupy_it() -> None:
    # ranks 0 and 1 of three send through one card: rank 1's second transfer waits only for the card
    shared = {(0, 1): Route(0.5, (("nic", 1.0),)), (1, 2): Route(0.5, (("nic", 1.0),))}
    costs = StepCosts(forward_s=(1, 1, 1), backward_s=(0, 0, 0), activation_bytes=(2, 2, 2), routes=shared)
    timeline = run("gpipe", costs, 2, ranks=3, forward_only=True)
    # card: 0->1 m0 1-3, m1 3-5; rank 1 computes m0 3.5-4.5, sends it 5-7, m1 arrives 5.5, computed 6.5, sent 7-9
    sent = [(s.start_s, s.end_s) for row in timeline.spans for s in row if s.kind == "transfer"]
    assert sent == [(1, 3.5), (3, 5.5), (5, 7.5), (7, 9.5)]
    assert timeline.step_s == pytest.approx(10.5)


def test_reductions_by_hand() -> None:
    costs = StepCosts(forward_s=(1, 1), backward_s=(2, 2), reduce_s=(4, 4), update_s=(1, 1), reduce_parts=(2, 2))
    # rank 0's last backward is 7-9; its first half is ready at 8, so reduced by 12; rank 1's by 10
    timeline = run("1f1b", costs, 2, ranks=2)
    assert timeline.step_s == 13 and timeline.exposed_s["data_parallel"] == 3 + 3


def test_fetches_by_hand() -> None:
    costs = StepCosts(forward_s=(1, 1, 1, 1), backward_s=(2, 2, 2, 2), fetch_s=(2, 0, 4, 0))
    timeline = run("interleaved_1f1b", costs, 2, ranks=2, chunks=2)
    gathers = [[(s.start_s, s.end_s, s.stage) for s in row if s.kind == "gather"] for row in timeline.spans]
    # both are requested at the start, since stage 2 is one ahead; the second waits for the first
    assert gathers == [[(0, 2, 0), (2, 6, 2)], []]
    # F0.0 waits for 2 s; F2.0 could start at 4 (after F1.0) and waits until 6
    assert [(s.start_s, s.microbatch) for s in timeline.spans[0] if s.kind == "forward"] == [
        (2, 0),
        (3, 1),
        (6, 0),
        (7, 1),
    ]
    assert timeline.exposed_s["data_parallel"] == 2 + 2


def test_what_processors_carry_takes_their_time_unless_they_wait_by_hand() -> None:
    routes = {pair: Route(0.0, (), carried=2.0) for pair in ((0, 1), (1, 0))}
    costs = StepCosts(
        forward_s=(1.0, 3.0), backward_s=(2.0, 1.0), activation_bytes=(1.0, 0.0), routes=routes, byte_s=(0.25, 0.5)
    )
    timeline = run("gpipe", costs, 2, ranks=2)
    starts = [[(span.start_s, span.end_s) for span in spans] for spans in timeline.spans]
    # half a second for a message on rank 0, a whole one on rank 1, which waits for its first one anyway
    assert starts[0] == [(0.0, 1.0), (1.5, 2.5), (10.5, 12.5), (12.5, 15.0)]
    assert starts[1] == [(1.5, 4.5), (4.5, 8.5), (8.5, 9.5), (10.5, 11.5)]
    assert timeline.step_s == 15.0


@pytest.mark.parametrize(("reduce_s", "step_s"), [(3.0, 5.25), (0.1, 3.75)])
def test_carrying_gradients_and_parameters_slows_computing_by_hand(reduce_s: float, step_s: float) -> None:
    costs = StepCosts(
        forward_s=(1.0,),
        backward_s=(2.0,),
        reduce_s=(reduce_s,),
        reduce_parts=(2,),
        reduce_own_s=(1.0,),
        gather_own_s=(0.25,),
    )
    # the forward ends at 1.25, the backward at 3.25; its first half is carried by 3.75, or longer on its way
    assert run("1f1b", costs, 1, ranks=1).step_s == pytest.approx(step_s)
    two = run("1f1b", costs, 2, ranks=1).step_s  # parameters are gathered once, and gradients reduced once
    assert two == pytest.approx(step_s + 3.0)


def test_memory_of_schedules() -> None:
    costs = StepCosts(
        forward_s=(1,) * 4, backward_s=(2,) * 4, held_bytes=(10,) * 4, static_bytes=(100,) * 4, transient_bytes=(1,) * 4
    )
    assert run("1f1b", costs, 8, ranks=4).peak_memory_bytes == (141, 131, 121, 111)
    assert run("gpipe", costs, 8, ranks=4).peak_memory_bytes == (181,) * 4
    assert run("1f1b", costs, 8, ranks=4, forward_only=True).peak_memory_bytes == (111,) * 4


@pytest.mark.parametrize(("ranks", "name", "chunks"), [(512, "1f1b", 1), (64, "interleaved_1f1b", 4)])
def test_large_pipelines_take_no_more_for_an_action_than_small_ones(ranks: int, name: str, chunks: int) -> None:
    route = {(r, (r + step) % ranks): Route(1e-3, ((f"{r}:{step}", 1e-3),)) for r in range(ranks) for step in (-1, 1)}
    route = {(source, target % ranks): way for (source, target), way in route.items()}
    costs = StepCosts(
        forward_s=(1.0,) * (ranks * chunks),
        backward_s=(2.0,) * (ranks * chunks),
        activation_bytes=(1.0,) * (ranks * chunks),
        routes=route,
    )
    schedule = make_schedule(name, pipeline_parallel_size=ranks, num_microbatches=64, num_chunks=chunks)
    timeline, calls = count_calls(lambda: simulate(schedule, costs))
    assert timeline.step_s > (64 * chunks + ranks - 1) * 3
    assert calls < 40 * sum(map(len, schedule.actions))


def test_nothing_is_sent_to_a_rank_that_computes_where_sends_block_by_hand() -> None:
    # rank 1 takes three times as long. Microbatch 1 is sent from 5 on, when rank 1 is done with 0, and 2 from 9 on: its forwards
    # end at 13 instead of 11; then it has three backwards of 6 s, each with a second on the way, and rank 0 the last one of 2 s
    routes = {(0, 1): Route(0.0, (("up", 1.0),)), (1, 0): Route(0.0, (("down", 1.0),))}
    costs = StepCosts(forward_s=(1.0, 3.0), backward_s=(2.0, 6.0), activation_bytes=(1.0, 0.0), routes=routes)
    schedule = make_schedule("gpipe", pipeline_parallel_size=2, num_microbatches=3)
    assert simulate_blocking(schedule, costs).step_s == 13 + 3 * (6 + 1) + 2
    assert run("gpipe", costs, 3, ranks=2).step_s == 11 + 3 * 6 + 1 + 2


@pytest.mark.parametrize("name", ["interleaved_1f1b", "eager_interleaved_1f1b", "zero_bubble_v", "eager_1f1b"])
def test_ranks_that_send_in_a_ring_do_not_wait_for_ever(name: str) -> None:
    chunks = 1 if name == "eager_1f1b" else 2
    routes = {(a, b): Route(0.0, ((f"{a}{b}", 1.0),)) for a in range(4) for b in range(4) if a != b}
    costs = StepCosts(
        forward_s=(1.0,) * 4 * chunks,
        backward_s=(2.0,) * 4 * chunks,
        activation_bytes=(1.0,) * 4 * chunks,
        routes=routes,
    )
    schedule = make_schedule(name, pipeline_parallel_size=4, num_microbatches=8, num_chunks=chunks)
    assert simulate_blocking(schedule, costs).step_s > 0


def test_a_layered_step_with_parameters_in_shards_by_hand() -> None:
    """One rank, three stages, two microbatches; gathers of 3 s and reductions of 2 s share a lane and overlap with
    computation."""
    costs = StepCosts(forward_s=(1,) * 3, backward_s=(2,) * 3, fetch_s=(3,) * 3, reduce_s=(2,) * 3, update_s=(1,))
    timeline = run("breadth_first", costs, 2, ranks=1, chunks=3)
    lane = [(s.start_s, s.end_s, s.kind, s.stage) for s in timeline.spans[0] if s.kind in ("gather", "reduce")]
    # F0 from 3; FT1, asked for with FT0, ends at 6; stage 1 stays while stage 2 is computed; FT0 again is asked for when the
    # backwards of stage 1 begin, before R2
    assert lane == [
        *((0, 3, "gather", 0), (3, 6, "gather", 1), (6, 9, "gather", 2), (15, 18, "gather", 0)),
        *((18, 20, "reduce", 2), (20, 22, "reduce", 1), (23, 25, "reduce", 0)),
    ]
    computed = [(s.start_s, s.end_s, s.kind, s.stage) for s in timeline.spans[0] if s.kind in ("forward", "backward")]
    assert computed == [
        *((3, 4, "forward", 0), (4, 5, "forward", 0), (6, 7, "forward", 1), (7, 8, "forward", 1)),
        *((9, 10, "forward", 2), (10, 12, "backward", 2), (12, 13, "forward", 2), (13, 15, "backward", 2)),
        *((15, 17, "backward", 1), (17, 19, "backward", 1), (19, 21, "backward", 0), (21, 23, "backward", 0)),
    ]
    # before the first forward, before stages 1 and 2, and the last reduction
    assert timeline.step_s == 25 + 1 and timeline.exposed_s["data_parallel"] == 3 + 1 + 1 + 2
