"""Assigns the layers to the stages of a candidate by a rule.

partition = assign_layers(cost_model, run, "self_adapting")
"""

from __future__ import annotations

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition, make_partition
from lightning_holmes.plan.run_shape import RunShape
from lightning_holmes.plan.schedule import ranks_of_stages
from lightning_holmes.plan.self_adapting import NothingFitsError

_GIB = 2.0**30


def assign_layers(
    cost_model: CostModel, run: RunShape, rule: str | tuple[int, ...], *, limit_memory: bool = True
) -> Partition:
    """Make the partition of a run; a stage has the speed of the rank on which its schedule places it.

    Args:
        rule: the name of a rule, or layer counts.
        limit_memory: whether "self_adapting" keeps within the memory of each rank.

    Raises:
        NothingFitsError: "self_adapting" finds no partition that fits the memory.
        ConfigurationError: the rule cannot be applied to these layers and stages.
    """
    ranks = ranks_of_stages(run.schedule, pipeline_parallel_size=run.layout.pipeline, num_chunks=run.num_chunks)
    by_rank = cost_model.speeds(run.layout)
    balance = cost_model.balance(run, limit_memory=limit_memory) if rule == "self_adapting" else None
    speeds = [by_rank[rank] for rank in ranks]
    return make_partition(rule, cost_model.model.num_layers, len(ranks), speeds=speeds, balance=balance)


def check_memory(cost_model: CostModel, run: RunShape, partition: Partition) -> None:
    """Raise NothingFitsError if the partition exceeds the memory of a rank. It checks an upper bound; a simulation may need less."""
    balance = cost_model.balance(run)
    assert balance.limits is not None
    used = balance.memory(partition.layer_counts)
    excess, rank = max(
        (mine - limit, rank) for rank, (mine, limit) in enumerate(zip(used, balance.limits, strict=True))
    )
    if excess > 0:
        raise NothingFitsError(
            f"partition {list(partition.layer_counts)} passes the memory limit of pipeline rank {rank} by "
            f"{excess / _GIB:.2f} GiB",
            excess_bytes=excess,
            rank=rank,
        )
