"""The registry of schedules: its entries are complete, and a new schedule needs only a new entry."""

from typing import get_args

import pytest
from schedule_checks import validate_schedule

from lightning_holmes.plan.memory import stage_in_flight
from lightning_holmes.plan.schedule import (
    SCHEDULE_NAMES,
    SCHEDULES,
    ScheduleName,
    ScheduleSpec,
    make_schedule,
    max_in_flight,
)
from lightning_holmes.plan.schedule.action import Action
from lightning_holmes.plan.schedule.orders import RankShape
from lightning_holmes.plan.simulator import StepCosts, simulate


def test_every_name_has_an_entry_and_every_variant_is_one() -> None:
    assert get_args(ScheduleName) == SCHEDULE_NAMES == tuple(SCHEDULES)
    for spec in SCHEDULES.values():
        assert spec.description and not spec.description.endswith(".")
        assert spec.split_variant is None or SCHEDULES[spec.split_variant].is_split


def one_at_a_time(shape: RankShape) -> list[Action]:
    """Run each microbatch forward and backward before the next one begins."""
    forwards, backwards = shape.forwards(), shape.backwards()
    return [action for m in range(shape.num_microbatches) for action in forwards + backwards if action.microbatch == m]


@pytest.mark.parametrize("is_v_shaped", [False, True])
def test_a_new_entry_can_be_made_checked_simulated_and_weighed(
    monkeypatch: pytest.MonkeyPatch, is_v_shaped: bool
) -> None:
    spec = ScheduleSpec(
        name="naive",
        description="one microbatch at a time",
        order=one_at_a_time,
        num_chunks=2 if is_v_shaped else 1,
        is_v_shaped=is_v_shaped,
        receives_ahead=2,
    )
    monkeypatch.setitem(SCHEDULES, "naive", spec)
    size, chunks = 3, 2 if is_v_shaped else 1
    schedule = make_schedule("naive", pipeline_parallel_size=size, num_microbatches=4, num_chunks=chunks)
    validate_schedule(schedule)
    assert schedule.stages_of(0) == ((0, 5) if is_v_shaped else (0,))
    assert simulate(schedule, StepCosts.even(size * chunks)).step_s == pytest.approx(4 * size * chunks * 3.0)
    assert max_in_flight(schedule) == (chunks,) * size
    assert stage_in_flight("naive", size, 4, chunks) == (chunks,) * (size * chunks)
