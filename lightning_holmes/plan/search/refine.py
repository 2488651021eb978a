"""Moves layers between neighbouring stages while that makes the simulated step faster.

    prediction = refine(cost_model, predict(cost_model, run, partition))

The optimum of the slowest stage (self_adapting.py) does not know of transfers: with few stages a rank that is not quite
as loaded as its neighbour has time to wait for what is under way, and the step may be faster for it.
"""

from collections.abc import Iterator

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.prediction import Prediction, fits, predict

_GAIN = 0.01  # what a move must save
_LARGEST = 2048  # stages x microbatches: a simulation of more takes too long to be repeated
_MOST = 64  # simulations


def refine(cost_model: CostModel, prediction: Prediction) -> Prediction:
    """The prediction with the best partition that single moves lead to; the same one where none saves 1 %.

    Split points that are forbidden are not tried, nor are partitions that do not fit the memory. It ends after 64 simulations, and
    where stages x microbatches are more than 2048 there is none.
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
        if fastest.step_s > best.step_s * (1 - _GAIN):
            return best
        best = fastest


def _moved(partition: Partition, forbidden_cuts: tuple[int, ...]) -> Iterator[Partition]:
    """Every partition in which one layer has gone to the stage before or after its own."""
    counts = partition.layer_counts
    for stage in range(len(counts) - 1):
        for step in (1, -1):
            left, right = counts[stage] + step, counts[stage + 1] - step
            if min(left, right) >= 1:
                moved = Partition((*counts[:stage], left, right, *counts[stage + 2 :]))
                if not moved.split_points & set(forbidden_cuts):
                    yield moved
