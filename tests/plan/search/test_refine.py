"""Moves of layers by simulation reach the best of all partitions, within the allowed cuts and the memory."""

import pytest
from test_choose import LAYOUT, costs

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition, make_partition
from lightning_holmes.plan.prediction import Prediction, predict
from lightning_holmes.plan.run_shape import RunShape
from lightning_holmes.plan.search.refine import GAIN, refine

RUN = RunShape(layout=LAYOUT, schedule="1f1b", num_microbatches=8, microbatch_samples=2)


def first_dealt(model: CostModel) -> Prediction:
    """Return the prediction for the partition with the fastest slowest stage."""
    return predict(model, RUN, make_partition("self_adapting", 10, 2, balance=model.balance(RUN)))


@pytest.mark.parametrize("speed", [0.4, 0.45, 0.5, 1.0])
@pytest.mark.parametrize("bandwidth", [1e5, 2e5, 4e5, 1e7])
def test_two_stages_come_to_the_best_of_all_partitions(speed: float, bandwidth: float) -> None:
    model = costs(speeds=(1.0, speed), bandwidth=bandwidth, layers=10)
    every = [predict(model, RUN, Partition((first, 10 - first))).step_s for first in range(1, 10)]
    assert refine(model, first_dealt(model)).step_s <= min(every) / (1 - GAIN)


def test_a_slow_link_takes_layers_from_the_slow_rank() -> None:
    model = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10)
    before = first_dealt(model)
    assert before.partition.layer_counts == (7, 3)
    assert refine(model, before).partition.layer_counts == (8, 2)


def test_forbidden_cuts_and_too_little_memory_are_left_alone() -> None:
    forbidden = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10, forbidden_cuts=(7,))
    assert refine(forbidden, first_dealt(forbidden)).partition.layer_counts == (7, 3)
    free = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10)
    needed = max(first_dealt(free).memory_bytes)
    tight = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10, memory=needed / free.training.memory_share)
    assert refine(tight, first_dealt(tight)).partition.layer_counts == (7, 3)
