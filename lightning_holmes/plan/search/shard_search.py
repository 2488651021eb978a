"""Decides whether parameters are sharded: if that is asked for, or if nothing fits the memory otherwise.

    result = search_with_sharding(cost_model, space, "auto")
    result.best.sharded_parameters, result.sharding_note

Parameters are sharded with breadth-first schedules only: any other order would gather a stage for each microbatch, or hold it unsharded.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import AskedSharding
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.plan.search.candidates import LAYERED_SCHEDULES, SearchSpace
from lightning_holmes.plan.search.comparison import SearchResult, search
from lightning_holmes.plan.self_adapting import NothingFitsError


def search_with_sharding(
    cost_model: CostModel, space: SearchSpace, sharding: AskedSharding, *, why_not: str | None = None
) -> SearchResult:
    """Find the fastest plan that fits, with sharded parameters if ``sharding`` is "parameters", or if it is "auto" and nothing fits otherwise.

    Args:
        why_not: why "auto" must not shard parameters, in words; None: it may.

    Raises what :func:`search` raises.
    """
    layered = _layered(space)
    if sharding == "parameters":
        if layered is None:
            why = f"schedule={space.schedules[0]!r} would gather each stage for each microbatch"
            if space.tensor and 1 not in space.tensor:
                why = "parameters are sharded over replicas or over a tensor group, not both"
            raise ConfigurationError(f'sharding="parameters": {why}; leave one of them out')
        return search(cost_model.with_sharded_parameters(), layered)
    one_replica = space.layout is not None and space.layout.data == 1
    is_whole = sharding != "auto" or cost_model.training.optimizer_nodes or why_not is not None or one_replica
    if is_whole or layered is None:
        return search(cost_model, space)
    whole = None
    try:
        whole = search(cost_model, space)
        if whole.memory_note is None:
            return whole
        problem: str | NothingFitsError = whole.memory_note
    except NothingFitsError as error:
        problem = error
    try:
        shards = search(cost_model.with_sharded_parameters(), layered)
    except ConfigurationError:
        if whole is None:
            raise
        return whole
    if whole is not None and shards.memory_note is not None:
        return whole
    return replace(shards, sharding_note=f"sharding: parameters, since otherwise {problem}")


def _layered(space: SearchSpace) -> SearchSpace | None:
    """The space with layered schedules only, which gather a stage twice a step, and without tensor parallelism; None if it is empty."""
    names = tuple(name for name in space.schedules if spec_of(name).is_layered)
    if not names and len(space.schedules) > 1:
        names = LAYERED_SCHEDULES
    sizes = (1,) if 1 in space.tensor else ()
    return replace(space, schedules=names, tensor=sizes) if names and sizes else None
