"""What is said where no plan fits the memory: by how much, and what would make it fit.

raise nothing_fits(cost_model, runs, excess_bytes=3e9, rank=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.self_adapting import NothingFitsError, solve

_GIB = 2.0**30


def nothing_fits(
    cost_model: CostModel,
    runs: Sequence[RunShape],
    *,
    excess_bytes: float,
    rank: int,
    recomputation: Sequence[bool] = (False,),
) -> NothingFitsError:
    """The error, whose message says what would make one of ``runs`` fit.

    Args:
        excess_bytes: what is missing on pipeline rank ``rank`` of the run that comes nearest.
        recomputation: what has been tried of it.
    """
    training, model = cost_model.training, cost_model.model
    cures = []
    changes: list[tuple[str, bool, bool]] = [
        ("activation recomputation", True, False),
        ("a sharded optimizer", False, True),
        ("activation recomputation and a sharded optimizer", True, True),
    ]
    for what, again, sharded in changes:
        known = (not again or True in recomputation) and (not sharded or training.sharded_optimizer is not False)
        if known:
            continue
        changed = replace(training, sharded_optimizer=True if sharded else training.sharded_optimizer)
        other = CostModel(model, cost_model.network, devices=cost_model.devices, training=changed)
        allowed = (False, True) if again else recomputation
        if any(_can_fit(other, run) for run in _smallest(runs, allowed)):
            cures.append(what)
            break
    limit = max(max(cost_model.memory_limits(run.layout)) for run in runs)
    cures.append(f"devices with {(limit + excess_bytes) / training.memory_share / _GIB:.1f} GiB each")
    if max(run.layout.tensor for run in runs) == 1:
        cures.append("tensor parallelism, if the module knows it (tensor sizes above 1 were not allowed)")
    cures.append("more devices")
    return NothingFitsError(
        f"{model.name} ({model.parameter_bytes / _GIB:.1f} GiB of parameters) fits none of "
        f"{len(runs)} plans on {cost_model.num_devices} devices: {excess_bytes / _GIB:.2f} GiB a device are "
        f"missing at the least. What would make it fit: {'; or '.join(cures)}",
        excess_bytes=excess_bytes,
        rank=rank,
    )


def excess_of(entry: Prediction) -> tuple[float, int]:
    """The bytes that a prediction lacks on the pipeline rank that lacks the most, negative where it fits; and that rank."""
    lacking = (mine - limit for mine, limit in zip(entry.memory_bytes, entry.memory_limits, strict=True))
    return max((excess, rank) for rank, excess in enumerate(lacking))


def _smallest(runs: Sequence[RunShape], recomputation: Sequence[bool]) -> list[RunShape]:
    """The runs with these settings of recomputation, the smallest microbatches of each layout."""
    smallest: dict[tuple[Layout, str, int], RunShape] = {}
    for run in runs:
        key = run.layout, run.schedule, run.num_chunks
        if key not in smallest or run.microbatch_samples < smallest[key].microbatch_samples:
            smallest[key] = run
    return [replace(run, recomputation=flag) for run in smallest.values() for flag in recomputation]


def _can_fit(cost_model: CostModel, run: RunShape) -> bool:
    try:
        solve(cost_model.balance(run))
    except ConfigurationError:
        return False
    return True
