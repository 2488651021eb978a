"""The choice among several plans, since predictions are not exact."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_holmes.plan.search.preference import Preference


def predicted(step_s: float, num_microbatches: int, schedule: str = "1f1b", num_chunks: int = 1) -> Any:
    run = SimpleNamespace(num_microbatches=num_microbatches, schedule=schedule, num_chunks=num_chunks)
    return SimpleNamespace(step_s=step_s, run=run)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ([(2.64, 8), (2.54, 4, "breadth_first", 3)], 0),  # 3.8 %: less than several stages a rank must save
        ([(7.26, 18), (6.70, 6, "breadth_first", 3)], 1),
        ([(2.60, 16), (2.66, 8), (2.80, 4)], 2),  # the fewest microbatches within 8 %
        ([(2.40, 8, "breadth_first", 2), (2.40, 8, "eager_interleaved_1f1b", 2), (2.60, 8)], 1),
        ([(2.60, 8), (2.55, 8, "eager_1f1b")], 0),  # within 3 % the simpler one
        ([(2.60, 8), (2.40, 8, "eager_1f1b")], 1),
        ([(2.60, 8), (2.52, 8, "zero_bubble")], 0),
        ([(2.60, 8), (2.40, 8, "zero_bubble")], 1),
        ([(2.60, 8, "zero_bubble"), (2.70, 4, "zero_bubble")], 1),  # nothing else is possible
    ],
)
def test_what_a_plan_must_save(found: list[tuple[Any, ...]], taken: int) -> None:
    plans = [predicted(*plan) for plan in found]
    assert plans.index(Preference(microbatch_gain=0.08, chunks_gain=0.05).pick(plans)) == taken
