"""What belongs to a step: everything until the next batch begins or, if something else follows, until its batch ends."""

import torch

from lightning_holmes.pipeline.step_clock import StepClock


def test_what_comes_between_a_batch_and_validation_is_no_part_of_the_step() -> None:
    clock = StepClock(torch.device("cpu"), 0)
    for number in range(2):
        clock.begin_step(number)
        clock.add("forward", clock.mark(), 0, 0)
        clock.end_batch()
        with clock.noting("wait"):  # wait for the other ranks, before the next batch or before validation
            pass
    clock.interrupt()
    followed, last = clock.steps()[0], clock.steps()[1]
    assert [event.kind for event in followed.events] == ["forward", "wait"]
    assert [event.kind for event in last.events] == ["forward"]
    for step in (followed, last):
        assert all(step.began_s <= event.start_s <= event.end_s <= step.ended_s for event in step.events)
