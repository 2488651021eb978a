"""A run and the command choose the same plan for the same costs and the same layout."""

import dataclasses
from itertools import product
from typing import Any

import pytest
from covering import selected
from test_choose import chosen, costs

from lightning_holmes.commands.plan_command import PlanRequest, _space
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.search import search

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v")
RULES: tuple[Any, ...] = ("self_adapting", "uniform", (7, 5), (4, 2, 2, 4))
LIMITS: tuple[Any, ...] = (
    ("auto", (), 1e12),
    ("auto", (2, 5), 1e12),
    ("auto", (), 4e7),
    (3, (), 1e12),
    (4, (2, 5), 4e7),
)
SPEEDS = ((1.0, 1.0), (2.0, 1.0), (1.0, 1.7))
BANDWIDTHS = (1e12, 4e5)


def by_run(costs: CostModel, asked: dict[str, Any]) -> Any:
    options = Asked(**asked)
    found = chosen(options, costs).prediction
    assert found is not None
    return found


def by_command(costs: CostModel, asked: dict[str, Any]) -> Any:
    options = Asked(**asked, pipeline_parallel_size=2)
    space = _space(PlanRequest(), options, is_plan=False, model=costs.model)
    # the command refuses what does not fit even if nothing is left open, a run takes it with a note
    return search(costs, dataclasses.replace(space, is_settled=not options.leaves_open)).best


@pytest.mark.parametrize(
    ("schedule", "rule", "speeds", "bandwidth"),
    selected(list(product(SCHEDULES, RULES, SPEEDS, BANDWIDTHS)), cost=lambda row: 2.0 if row[0] == "auto" else 1.0),
    ids=str,
)
def test_the_same_costs_give_the_same_plan(
    schedule: str, rule: Any, speeds: tuple[float, float], bandwidth: float
) -> None:
    chunks = 2 if schedule == "zero_bubble_v" else "auto"
    partition = list(rule) if isinstance(rule, tuple) else rule
    for count, forbidden, memory in LIMITS:
        model = costs(speeds=speeds, bandwidth=bandwidth, forbidden_cuts=forbidden, memory=memory, head=1.0)
        asked = {"schedule": schedule, "num_chunks": chunks, "partition": partition, "num_microbatches": count}
        try:
            run = by_run(model, asked)
        except ConfigurationError as error:
            with pytest.raises(type(error)) as told:
                by_command(model, asked)
            assert type(told.value) is type(error)
            continue
        command = by_command(model, asked)
        layout = dataclasses.replace(run.run.layout, grid=None)
        assert (command.run, command.partition) == (dataclasses.replace(run.run, layout=layout), run.partition), asked
        assert command.step_s == run.step_s
