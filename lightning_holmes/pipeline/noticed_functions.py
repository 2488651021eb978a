"""Sees calls of torch's functions by the user's code: collectives, and those of autograd.

    with NoticedFunctions(torch.distributed, COUNTING).noticing(names.append):
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


class NoticedFunctions:
    """Sees the functions ``names`` of a module ``space``; of collectives those over all ranks (without a ``group``)."""

    def __init__(self, space: types.ModuleType, names: tuple[str, ...]) -> None:
        self._space = space
        self._originals: dict[Any, str] = {}
        for name in names:
            function = getattr(space, name)
            while function is not None:
                self._originals[function], function = name, getattr(function, "__wrapped__", None)
        self._names = names
        self._imported: list[tuple[Any, str, str]] = []  # files of the user's, their names of collectives, and torch's
        self._num_files = 0  # of sys.modules, when they were looked for

    @contextmanager
    def noticing(
        self, notice: Callable[[str], Any], *, of_any_group: bool = False, of_libraries: bool = True
    ) -> Iterator[None]:
        """Inside, call ``notice`` with the name of a function before it runs; what it returns, if anything, is returned instead.
        ``of_any_group``: also before collectives over some ranks, but for those that libraries call; ``of_libraries``: what libraries call, too."""
        noticed = functools.partial(_noticed, notice=notice, of_any_group=of_any_group, of_libraries=of_libraries)
        if self._num_files != len(sys.modules):
            self._num_files, self._imported = len(sys.modules), list(self._find_imported())
        with Replacements() as watched:
            watched.replace(self._space, **{name: noticed(getattr(self._space, name), name) for name in self._names})
            for file, alias, name in self._imported:
                watched.replace(file, **{alias: noticed(getattr(file, alias), name)})
            yield

    def _find_imported(self) -> Iterator[tuple[Any, str, str]]:
        for path, file in list(sys.modules.items()):
            for alias, value in [] if is_library(path) else list(getattr(file, "__dict__", {}).items()):
                if isinstance(value, types.FunctionType) and value in self._originals:
                    yield file, alias, self._originals[value]


def _is_called_by_user(frame: types.FrameType | None) -> bool:
    """Whether the function that runs in ``frame`` was called by no library."""
    caller = None if frame is None else frame.f_back
    return caller is not None and not is_library(caller.f_globals.get("__name__", ""))


def _noticed(
    function: Callable[..., Any], name: str, *, notice: Callable[[str], Any], of_any_group: bool, of_libraries: bool
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("group")
        is_over_all = group is None or group is dist.group.WORLD
        if (is_over_all and of_libraries) or (
            (is_over_all or of_any_group) and _is_called_by_user(inspect.currentframe())
        ):
            answer = notice(name)
            if answer is not None:
                return answer
        return function(*args, **kwargs)

    return run
