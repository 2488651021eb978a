"""Seconds of collectives, compared with rings and trees that are walked step by step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_holmes.plan.collective_cost import all_reduce_s, ring_all_reduce_s
from lightning_holmes.plan.route import Channel


@given(st.integers(1, 40), st.floats(0, 1e9), st.floats(1e6, 1e11), st.floats(0, 1e-3))
def test_ring_step_by_step(size: int, num_bytes: float, bandwidth: float, latency: float) -> None:
    clock = 0.0
    for _ in range(size - 1):  # in each step every member sends one part to its neighbour
        clock += latency + (num_bytes / size) / bandwidth
    how = {"size": size, "bandwidth": bandwidth, "latency": latency}
    assert ring_all_reduce_s(num_bytes, **how) == pytest.approx(2 * clock)


@given(st.integers(1, 8), st.integers(1, 64), st.floats(1, 1e9), st.floats(1e6, 1e10))
def test_the_best_is_no_slower_than_any_and_no_faster_than_the_bytes(
    local: int, hosts: int, num_bytes: float, bandwidth: float
) -> None:
    inside, between = Channel("local", 3e11, 1e-6), Channel("ethernet", bandwidth, 1e-5)
    best = all_reduce_s(num_bytes, local=inside, channel=between, local_size=local, num_hosts=hosts)
    if hosts == 1:
        assert best <= ring_all_reduce_s(num_bytes, size=local, bandwidth=3e11, latency=1e-6)
    else:
        # a ring inside each host, and one over the hosts for the part of each member
        parts_s = ring_all_reduce_s(num_bytes / local, size=hosts, bandwidth=bandwidth / local, latency=1e-5)
        levels_s = ring_all_reduce_s(num_bytes, size=local, bandwidth=3e11, latency=1e-6) + parts_s
        assert best <= levels_s * (1 + 1e-9)
        # every host sends at least (n-1)/n of the sum and receives as much
        assert best >= 2 * (hosts - 1) / hosts * num_bytes / bandwidth * (1 - 1e-9)
    assert math.isfinite(best)
