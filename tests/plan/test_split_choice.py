"""The choice between 1F1B and zero-bubble from measured stages."""

import dataclasses

from lightning_holmes.plan.split_choice import StageSeconds, choose_split, slowest

STAGE = StageSeconds(forward_s=1.0, backward_s=2.0, input_s=1.0, weight_s=1.0)


def test_a_split_that_costs_nothing_is_chosen_and_a_dear_one_is_not() -> None:
    choice = choose_split([STAGE] * 4, num_microbatches=8)
    assert choice.schedule == "zero_bubble"
    # 1F1B: (8 + 3) * 3; ZB-H1: 8 * 3 + 3 * (1 + 1 - 1)
    assert "33 s with 1f1b" in choice.reason and "27 s with zero_bubble" in choice.reason
    dear = dataclasses.replace(STAGE, input_s=2.0, weight_s=1.2)
    choice = choose_split([STAGE, dear, dear, dear], num_microbatches=8)
    assert choice.schedule == "1f1b" and "1.60, 1.60, 1.60" in choice.reason


def test_a_gain_within_the_noise_is_none() -> None:
    # many microbatches: the bubble is small, and a split that costs 3 % more than it saves is not taken
    nearly = dataclasses.replace(STAGE, input_s=1.05, weight_s=1.04)
    assert choose_split([STAGE, nearly], num_microbatches=60).schedule == "1f1b"


def test_what_cannot_be_split_or_does_not_fit_stays_whole() -> None:
    choice = choose_split([STAGE, None, STAGE], num_microbatches=8)
    assert choice.schedule == "1f1b" and "stage 1" in choice.reason
    full = dataclasses.replace(STAGE, held_bytes=2**30, room_bytes=2.5 * 2**30)
    assert choose_split([full] * 3, num_microbatches=8).schedule == "zero_bubble"  # rank 2 holds 2 more
    choice = choose_split([full] * 4, num_microbatches=8)
    assert choice.schedule == "1f1b" and "hold 4 microbatches on stage 3 instead of 1, 3.0 GiB more" in choice.reason


def test_the_slowest_replica_counts() -> None:
    other = dataclasses.replace(STAGE, forward_s=3.0, room_bytes=5.0)
    assert slowest([STAGE, other]) == dataclasses.replace(STAGE, forward_s=3.0, room_bytes=5.0)
    assert slowest([STAGE, None]) is None and slowest([]) is None
