"""Sees collectives of torch.distributed over all ranks that code of the user's calls: each stage of a replica takes part in them.

    with noticing_raw_collectives(names.append):
        dist.all_reduce(value)              # names == ["all_reduce"]

So are those that a file of the user's has imported by name (``from torch.distributed import all_reduce``).
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_holmes.pipeline.object_state import is_library
from lightning_holmes.replacements import Replacements

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
        for file, alias, name in _imported_by_name(names, len(sys.modules)):
            watched.replace(file, **{alias: _noticed(getattr(file, alias), name, notice)})
        yield


@functools.lru_cache(maxsize=4)
def _imported_by_name(names: tuple[str, ...], num_files: int) -> list[tuple[Any, str, str]]:
    """The files of the user's that have imported collectives, under which name, and their own names. ``num_files``: of sys.modules."""
    originals, found = {}, []
    for name in names:
        function = getattr(dist, name)
        while function is not None:
            originals[function], function = name, getattr(function, "__wrapped__", None)
    for path, file in list(sys.modules.items()):
        if not is_library(path):
            own = list(getattr(file, "__dict__", {}).items())
            found += [(file, k, originals[v]) for k, v in own if isinstance(v, types.FunctionType) and v in originals]
    return found


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
