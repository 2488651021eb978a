"""Decides whether parameters are sharded: only if nothing fits otherwise.

    result = search_with_sharding(cost_model, space, "auto")
    result.best.sharded_parameters, result.sharding_note

``cost_model`` is for unsharded parameters. Parameters are sharded with breadth-first schedules only: any other order would gather a
stage for each microbatch, or hold it unsharded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.plan.search.candidates import LAYERED_SCHEDULES, SearchSpace
from lightning_holmes.plan.search.planner import SearchResult, search
from lightning_holmes.plan.self_adapting import NothingFitsError


def search_with_sharding(
    cost_model: CostModel, space: SearchSpace, asked: bool | Literal["auto"], *, why_not: str | None = None
) -> SearchResult:
    """Find the fastest plan that fits, with sharded parameters if ``asked`` is True. "auto": if nothing fits otherwise.

    Args:
        why_not: why "auto" must not shard parameters, in words; None: it may.

    Raises what :func:`search` raises.
    """
    if asked is False:
        return search(cost_model, space)
    sharded, layered = cost_model.with_sharded_parameters(), _layered(space)
    if layered is None:
        why_not = f"schedule={space.schedules[0]!r} would gather each stage for each microbatch"
        if space.tensor and 1 not in space.tensor:
            why_not = "parameters are sharded over replicas or over a tensor group, not both"
    if asked is True:
        if layered is None:
            raise ConfigurationError(f"sharded_parameters=True: {why_not}; leave one of them out")
        return search(sharded, layered)
    if space.layout is not None and space.layout.data == 1:
        why_not = "there is one replica"
    elif why_not is None and cost_model.training.sharded_optimizer is False:
        why_not = "sharded_optimizer is False"
    if why_not is not None or layered is None:
        return replace(search(cost_model, space), sharding_note=f"sharded_parameters: off, since {why_not}")
    whole = None
    try:
        whole = search(cost_model, space)
        lack = whole.memory_note
    except NothingFitsError as error:
        lack = str(error)
    if whole is not None and lack is None:
        return replace(whole, sharding_note="sharded_parameters: off, since it fits without")
    try:
        parts = search(sharded, layered)
    except ConfigurationError:
        if whole is None:
            raise
    else:
        if whole is None or parts.memory_note is None:
            return replace(parts, sharding_note=f"sharded_parameters: on, since otherwise {lack}")
    return replace(whole, sharding_note="sharded_parameters: off, since no plan with them fits")


def _layered(space: SearchSpace) -> SearchSpace | None:
    """The space with layered schedules only, which gather a stage twice a step, and without tensor parallelism; None if it is empty."""
    names = tuple(name for name in space.schedules if spec_of(name).is_layered)
    if not names and len(space.schedules) > 1:
        names = LAYERED_SCHEDULES
    sizes = (1,) if 1 in space.tensor else ()
    return replace(space, schedules=names, tensor=sizes) if names and sizes else None
