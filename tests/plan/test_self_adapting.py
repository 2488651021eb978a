"""The rule that assigns layers to unequal stages, compared with an exhaustive search."""

import functools
import itertools
import math
import random

import pytest
from counting import count_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.partition import make_partition
from lightning_holmes.plan.self_adapting import Balance, NothingFitsError, solve


def every_partition(num_layers: int, num_stages: int):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(ends[i + 1] - ends[i] for i in range(num_stages))


def best_of_all(balance: Balance) -> float:
    """Return the time of the slowest rank in the best partition, by plain loops; inf if none fits."""
    best = math.inf
    ranks, last = balance.num_ranks, balance.num_stages - 1
    down, up = list(range(ranks)), list(reversed(range(ranks)))
    where = [*down, *(up if balance.v_shaped else down), *down][: last + 1]
    for counts in every_partition(balance.num_layers, balance.num_stages):
        loads, used, first, allowed = [0.0] * ranks, [0.0] * ranks, 0, True
        for stage, count in enumerate(counts):
            for layer in range(first, first + count):
                loads[where[stage]] += balance.seconds[where[stage]][layer]
                if balance.layer_bytes is not None:
                    used[where[stage]] += balance.layer_bytes[stage][layer]
            first += count
            if stage == 0:
                loads[0] += balance.before_seconds
                used[0] += balance.before_bytes
            if stage == last:
                loads[where[stage]] += balance.after_seconds
                used[where[stage]] += balance.after_bytes
            elif first - 1 in balance.forbidden_cuts:
                allowed = False
        if balance.limits is not None:
            allowed = allowed and all(mine <= limit for mine, limit in zip(used, balance.limits, strict=True))
        if allowed:
            best = min(best, max(loads))
    return best


@st.composite
def balances(draw: st.DrawFn, *, chunks: int, alike: bool) -> Balance:
    ranks = draw(st.integers(1 if chunks == 1 else 2, 5 if chunks == 1 else 3))
    stages = ranks * chunks
    size = draw(st.integers(stages, max(stages, 9)))
    whole = st.integers(0, 9)
    row = [draw(whole)] * size if alike else draw(st.lists(whole, min_size=size, max_size=size))
    seconds = tuple(tuple(float(value * factor) for value in row) for factor in draw_factors(draw, ranks))
    if not alike and draw(st.booleans()):  # each device has its own costs, not a multiple of the others'
        seconds = tuple(tuple(map(float, draw(st.lists(whole, min_size=size, max_size=size)))) for _ in range(ranks))
    layer_bytes = limits = None
    if draw(st.booleans()):
        held = [draw(whole)] * size if alike else draw(st.lists(whole, min_size=size, max_size=size))
        layer_bytes = tuple(tuple(float(value * factor) for value in held) for factor in draw_factors(draw, stages))
        limits = tuple(map(float, draw(st.lists(st.integers(1, 120), min_size=ranks, max_size=ranks))))
    cuts = () if alike else tuple(draw(st.sets(st.integers(0, size - 2), max_size=2))) if size > 1 else ()
    return Balance(
        seconds=seconds,
        num_chunks=chunks,
        v_shaped=draw(st.booleans()) if chunks > 1 else False,
        before_seconds=float(draw(whole)),
        after_seconds=float(draw(st.integers(0, 30))),
        layer_bytes=layer_bytes,
        before_bytes=float(draw(whole)),
        after_bytes=float(draw(whole)),
        limits=limits,
        forbidden_cuts=cuts,
    )


def draw_factors(draw: st.DrawFn, number: int) -> list[int]:
    return draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))


def check_against_all(balance: Balance) -> None:
    best = best_of_all(balance)
    if math.isinf(best):
        with pytest.raises(ConfigurationError):
            solve(balance)
        return
    counts = solve(balance)
    assert sum(counts) == balance.num_layers and min(counts) >= 1
    assert max(balance.loads(counts)) == best
    if balance.limits is not None:
        used = balance.memory(counts)
        assert all(mine <= limit for mine, limit in zip(used, balance.limits, strict=True))
    ends = set(itertools.accumulate(counts[:-1]))
    assert not ends & {cut + 1 for cut in balance.forbidden_cuts}


@settings(max_examples=400, deadline=None)
@given(balances(chunks=1, alike=False))
def test_one_chunk_equals_trying_everything(balance: Balance) -> None:
    check_against_all(balance)


@settings(max_examples=200, deadline=None)
@given(st.one_of(*(balances(chunks=chunks, alike=True) for chunks in (1, 2, 3))))
def test_chunks_of_alike_layers_equal_trying_everything(balance: Balance) -> None:
    check_against_all(balance)


def test_200_layers_on_64_stages_take_a_call_or_two_for_each_pair() -> None:
    draw = random.Random(3)
    row = tuple(draw.uniform(0.5, 2.0) for _ in range(200))
    slow = tuple(1.3 * value for value in row)
    balance = Balance(
        seconds=(row,) * 32 + (slow,) * 32,
        after_seconds=3.0,
        layer_bytes=tuple(tuple((64.0 - s) * value for value in row) for s in range(64)),
        limits=(600.0,) * 64,
    )
    chunks = Balance(seconds=((1.0,) * 200,) * 16, num_chunks=4, after_seconds=2.5)
    for problem in (balance, chunks):
        _, calls = count_calls(functools.partial(solve, problem))
        assert calls < 2 * 200 * 64


def test_rules_without_what_they_need_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the costs of the layers"):
        make_partition("self_adapting", 4, 2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_does_not_fit_says_by_how_much(chunks: int) -> None:
    gib = float(2**30)
    balance = Balance(
        seconds=((1.0,) * 8,) * 2, num_chunks=chunks, layer_bytes=((gib,) * 8,) * (2 * chunks), limits=(3 * gib,) * 2
    )
    with pytest.raises(NothingFitsError, match=r"1\.00 GiB.*limit is 3\.00 GiB") as caught:
        solve(balance)
    assert caught.value.excess_bytes == pytest.approx(gib, rel=1e-6)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 layers cannot fill 3 stages"):
        Balance(seconds=((1.0, 1.0),) * 3)
