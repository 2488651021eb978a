"""Notices which values that user's modules hold have changed since the last look, cheaply enough for each batch.

A look compares, by identity, what a module's attributes are bound to; only of new values, and of those that can change by themselves
(containers, objects, arrays, tensors), the content is described. What is large is left out, and modules of libraries are.

    watch = StateWatch([("", module)], lambda tensor: tensor_version(tensor))
    before = watch.look(); step(); watch.changed(before)        # {("", "losses"), ("head", "count")}
"""

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.pipeline.attributes import RESERVED
from lightning_holmes.pipeline.object_state import CONTAINERS, PLAIN, content, is_looked_into, is_of_library
from lightning_holmes.torch_private import registered_buffers

SMALL_BYTES = 1 << 16
_MOST_ENTRIES = 1000
_OPEN = (*CONTAINERS, Tensor, np.ndarray)
Look = dict[str, tuple["_Bound", tuple[Hashable, ...]]]


@dataclass(slots=True, eq=False)
class _Bound:
    """What the attributes of a module are bound to: ``fixed`` are the contents of values that cannot change by themselves, by name;
    ``open`` the names of others."""

    values: tuple[Any, ...]
    fixed: dict[str, Hashable]
    open: tuple[str, ...]


class StateWatch:
    """Watches ``modules``, by name; ``of_tensor`` describes a tensor."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], of_tensor: Callable[[Tensor], Hashable]) -> None:
        own = [(n, m) for n, m in modules if not (isinstance(m, Metric) or is_of_library(type(m)))]
        self.modules, self._of_tensor = own, of_tensor
        self._bound: dict[str, _Bound] = {}

    def look(self) -> Look:
        """The present state."""
        return {name: self._look_at(name, module) for name, module in self.modules}

    def changed(self, before: Look) -> set[tuple[str, str]]:
        """The names of modules and of their attributes and buffers that differ from an earlier look."""
        found: set[tuple[str, str]] = set()
        for name, (bound, contents) in self.look().items():
            was, then = before[name]
            if bound is was and contents == then:
                continue
            present, past = dict(zip(bound.open, contents, strict=True)), dict(zip(was.open, then, strict=True))
            if bound is not was:
                present, past = bound.fixed | present, was.fixed | past
            found |= {(name, key) for key, value in present.items() if past.get(key) != value}
        return found

    def _look_at(self, name: str, module: nn.Module) -> tuple[_Bound, tuple[Hashable, ...]]:
        values, buffers, bound = vars(module), registered_buffers(module), self._bound.get(name)
        present = (*values.values(), *buffers.values())
        if bound is None or len(bound.values) != len(present) or not all(map(operator.is_, bound.values, present)):
            own = {key: value for key, value in (values | buffers).items() if key not in RESERVED}
            is_open = {key: isinstance(value, _OPEN) or is_looked_into(value) for key, value in own.items()}
            fixed = {k: content(v, self._of_tensor) for k, v in own.items() if isinstance(v, PLAIN) and not is_open[k]}
            bound = self._bound[name] = _Bound(present, fixed, tuple(key for key, value in is_open.items() if value))
        return bound, tuple(self._content(values.get(key, buffers.get(key))) for key in bound.open)

    def _content(self, value: Any) -> Hashable:
        return content(value, self._of_tensor) if is_small(value) else None


def is_small(value: Any) -> bool:
    """Whether a tensor or array is small, or a container has few entries."""
    if isinstance(value, CONTAINERS):
        return len(value) <= _MOST_ENTRIES
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() <= SMALL_BYTES
    return bool(getattr(value, "nbytes", 0) <= SMALL_BYTES)


class RepeatedChanges:
    """Finds Python values of ``module`` that more than one pass of a batch (over a microbatch, or for a stage) changes."""

    def __init__(self, module: nn.Module) -> None:
        self._watch = StateWatch(module.named_modules(), lambda tensor: type(tensor).__name__)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: dict[str, list[str]] = {}

    def begin_batch(self) -> None:
        """Called before the passes of a batch."""
        self._counts.clear()

    def begin(self) -> None:
        """Called before a pass."""
        self._before = self._watch.look()

    def end(self) -> None:
        """Called after a pass."""
        self._counts.update(self._watch.changed(self._before))

    def end_batch(self, step_name: str) -> list[str]:
        """The names of what several passes have changed; not what those of the step's first batch have, of which the trace and the trial tell."""
        names = [".".join(filter(None, key)) for key, count in self._counts.items() if count > 1]
        known = self._known.setdefault(step_name, names)
        return [name for name in names if name not in known]
