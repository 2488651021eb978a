"""The choice of collectives and the detection of drift, on plain numbers."""

import pytest

from lightning_holmes.plan.sync_choice import DRIFT_STEPS, MIN_BUCKET_BYTES, DriftWatch, bucket_bytes, choose


def test_the_fastest_is_chosen_but_nothing_more_complicated_for_a_few_percent() -> None:
    assert choose({"all_reduce": 0.02, "reduce_scatter": 0.03, "p2p": 0.01}) == "p2p"
    assert choose({"all_reduce": 0.0104, "reduce_scatter": 0.03, "p2p": 0.01}) == "all_reduce"


@pytest.mark.parametrize("factor", [2.1, 0.45])
def test_a_drift_must_last(factor: float) -> None:
    watch = DriftWatch()
    assert not any(watch.note(1.0) for _ in range(10))
    assert watch.usual == 1.0
    assert not any(watch.note(factor) for _ in range(DRIFT_STEPS - 1))
    assert not watch.note(1.0)
    assert [watch.note(factor) for _ in range(DRIFT_STEPS)] == [False] * (DRIFT_STEPS - 1) + [True]
    watch.reset()
    assert not any(watch.note(factor) for _ in range(2 * DRIFT_STEPS)), "what is usual now"


def test_less_than_twice_is_no_drift() -> None:
    watch = DriftWatch()
    assert not any(watch.note(1.0 + 0.9 * (step > 20)) for step in range(100))


def test_bucket_size_balances_the_last_bucket_against_what_each_costs() -> None:
    size = bucket_bytes(100e6, latency_s=1e-3, s_per_byte=8e-9)

    def exposed(b: float) -> float:
        return b * 8e-9 + 100e6 / b * 1e-3

    assert exposed(size) <= min(exposed(0.8 * size), exposed(1.25 * size))
    assert bucket_bytes(1e6, latency_s=1e-6, s_per_byte=1e-9) == MIN_BUCKET_BYTES
