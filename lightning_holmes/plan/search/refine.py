"""Moves layers between neighbouring stages while the simulated step becomes faster.

    prediction = refine(cost_model, predict(cost_model, run, partition))

The partition with the fastest slowest rank (self_adapting.py) ignores transfers: with few stages, a rank with slightly less
load than its neighbour can wait for transfers without slowing the step, so that the step may be faster.
"""

from collections.abc import Iterator

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.prediction import Prediction, fits, predict

_LARGEST = 2048  # stages x microbatches: a larger simulation takes too long to be repeated
_MOST = 64  # the largest number of simulations
GAIN = 0.025
"""The share of a step that a move must save: less cannot be told by prediction, and measured speeds, which differ from start to start, would
decide."""


def refine(cost_model: CostModel, prediction: Prediction) -> Prediction:
    """Return the prediction of the best partition that single moves lead to. A move must save :data:`GAIN`.

    Forbidden split points are not tried, and partitions that do not fit the memory are not taken. At most 64 partitions are simulated;
    none if stages x microbatches exceed 2048.
    """
    run, best = prediction.run, prediction
    if best.partition.num_stages * run.num_microbatches > _LARGEST:
        return best
    tried = {best.partition}
    while True:
        candidates = [p for p in _moved(best.partition, cost_model.model.forbidden_cuts) if p not in tried]
        candidates = candidates[: _MOST - len(tried) + 1]
        tried.update(candidates)
        found = [predict(cost_model, run, partition) for partition in candidates]
        found = [entry for entry in found if fits(entry) or not fits(best)]
        fastest = min(found, key=lambda entry: entry.step_s, default=best)
        if fastest.step_s > best.step_s * (1 - GAIN):
            return best
        best = fastest


def _moved(partition: Partition, forbidden_cuts: tuple[int, ...]) -> Iterator[Partition]:
    """Every allowed partition with one layer moved to the previous or next stage."""
    counts = partition.layer_counts
    for stage in range(len(counts) - 1):
        for step in (1, -1):
            left, right = counts[stage] + step, counts[stage + 1] - step
            if min(left, right) >= 1:
                moved = Partition((*counts[:stage], left, right, *counts[stage + 2 :]))
                if not moved.split_points & set(forbidden_cuts):
                    yield moved
