"""The error if no plan fits the memory: how much is missing, and what can make one fit.

raise nothing_fits(cost_model, runs, lacks=[lack_of(prediction)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.self_adapting import NothingFitsError

# texts around the error's message, for runs and for the plan command
WITH_STATES = "memory: with an optimizer that keeps two numbers for each trained parameter, as AdamW does, "
BY_HAND = "memory: by its estimate "
WAY_OUT = (
    "That holds even for an optimizer that keeps nothing beside the parameters. To run it all the same give the layers of each stage by "
    "hand, partition=[...], which are not checked against the memory"
)
_GIB = 2.0**30


Lack = tuple[float, int, Layout]
"""The memory that a candidate lacks: bytes per device, negative if it fits; the pipeline rank that lacks the most; and the layout."""


def nothing_fits(cost_model: CostModel, runs: Sequence[RunShape], *, lacks: Sequence[Lack]) -> NothingFitsError:
    """Make the error; its message says what can make one of ``runs`` fit.

    Args:
        lacks: of the candidates that were evaluated; the message gives the smallest.
    """
    excess_bytes, rank, layout = min(lacks, key=lambda lack: lack[0])
    training, model = cost_model.training, cost_model.model
    cures = []
    if not training.sharded_parameters and any(run.layout.data > 1 and run.layout.tensor == 1 for run in runs):
        cures.append('parameters in shards, sharding="parameters"')
    if model.recomputed == 0:
        cures.append("recomputing activations, which is up to the module")
    limits = cost_model.facts(layout).memory
    needed = f"{(limits[rank] + excess_bytes) / training.memory_share / _GIB:.1f} GiB"
    if len(set(limits)) == 1:
        cures.append(f"devices with {needed} each")
    else:  # other ranks may lack as much
        more = f"{excess_bytes / training.memory_share / _GIB:.1f} GiB"
        cures.append(f"devices with {more} more each, which is {needed} on pipeline rank {rank}")
    if max(run.layout.tensor for run in runs) == 1:
        cures.append("tensor parallelism, if the module knows it (tensor sizes above 1 were not allowed)")
    cures.append("more devices")
    return NothingFitsError(
        f"{model.name} ({model.parameter_bytes / _GIB:.1f} GiB of parameters) fits none of "
        f"{len(runs)} plans on {cost_model.num_devices} devices: {excess_bytes / _GIB:.2f} GiB a device are "
        f"missing at the least. What can make it fit: {'; or '.join(cures)}",
        excess_bytes=excess_bytes,
        rank=rank,
    )


def lack_of(entry: Prediction) -> Lack:
    """The memory that a predicted plan lacks."""
    lacking = [mine - limit for mine, limit in zip(entry.memory_bytes, entry.memory_limits, strict=True)]
    rank = max(range(len(lacking)), key=lambda rank: (lacking[rank], rank))
    return lacking[rank], rank, entry.run.layout


def without_states(cost_model: CostModel, reason: NothingFitsError) -> CostModel:
    """The cost model with an optimizer without states, after nothing fitted with AdamW (``reason``): the optimizer is not known yet.

    Raises:
        NothingFitsError: ``cost_model`` already has no optimizer states; the message adds WAY_OUT to ``reason``.
    """
    bare = replace(cost_model.training, state_ratio=cost_model.training.least_state_ratio)
    if bare == cost_model.training:
        raise NothingFitsError(f"{reason}. {WAY_OUT}", excess_bytes=reason.excess_bytes, rank=reason.rank)
    return cost_model.with_training(bare)
