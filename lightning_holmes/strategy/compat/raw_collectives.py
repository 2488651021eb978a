"""Sees collectives of torch.distributed over all ranks that code of the user's calls: each stage of a replica takes part in them.

    with noticing_raw_collectives(names.append):
        dist.all_reduce(value)              # names == ["all_reduce"]

Functions that the user's code has imported by name (``from torch.distributed import all_reduce``) are not seen.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_holmes.strategy.compat.replacements import Replacements

COUNTING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "gather",
    "gather_object",
    "reduce",
)
"""Collectives whose results count their ranks."""
ALL = (*COUNTING, "barrier", "broadcast", "broadcast_object_list", "scatter", "reduce_scatter", "reduce_scatter_tensor")


@contextmanager
def noticing_raw_collectives(notice: Callable[[str], None], names: tuple[str, ...] = COUNTING) -> Iterator[None]:
    """Inside, call ``notice`` with the name of a collective of ``names`` before it runs over all ranks (without a ``group``)."""
    with Replacements() as watched:
        watched.replace(dist, **{name: _noticed(getattr(dist, name), name, notice) for name in names})
        yield


def _noticed(collective: Callable[..., Any], name: str, notice: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        group = _signature(collective).bind_partial(*args, **kwargs).arguments.get("group")
        if group is None or group is dist.group.WORLD:
            notice(name)
        return collective(*args, **kwargs)

    return run


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
