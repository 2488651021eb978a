"""Notices which values that user's modules hold have changed since the last look, cheaply enough for each batch.

A look compares, by identity, what a module's attributes are bound to; only of new values, and of those that can change by themselves
(containers, objects, arrays, tensors), the content is described. What is large is left out, and modules of libraries are.

    watch = StateWatch([("", module)], lambda tensor: tensor_version(tensor))
    before = watch.look(); step(); watch.changed(before, watch.look())        # {("", "losses"), ("head", "count")}
"""

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.pipeline.attributes import RESERVED, name_of
from lightning_holmes.pipeline.object_state import CONTAINERS, PLAIN, content, is_looked_into, is_of_library
from lightning_holmes.torch_private import registered_buffers

SMALL_BYTES = 1 << 16
_MOST_ENTRIES = 1000
_OPEN = (*CONTAINERS, Tensor, np.ndarray)


@dataclass(slots=True, eq=False)
class _Bound:
    """What the attributes of a module are bound to: ``fixed`` are the contents of values that cannot change by themselves, by name;
    ``open`` the values that can."""

    values: list[Any]
    fixed: dict[str, Hashable]
    open: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """The state at one time: what each module's attributes were bound to, and the contents of values that can change by themselves."""

    bound: dict[str, _Bound]
    contents: dict[str, dict[str, Hashable]]


class StateWatch:
    """Watches ``modules``, by name; ``of_tensor`` describes a tensor."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], of_tensor: Callable[[Tensor], Hashable]) -> None:
        self.modules = [(n, m) for n, m in modules if not (isinstance(m, Metric) or is_of_library(type(m)))]
        self._of_tensor = of_tensor
        self._spaces: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._bound: dict[str, _Bound] = {}

    def look(self) -> Look:
        """The present state."""
        values = [*itertools.chain.from_iterable(map(dict.values, self._spaces))]
        if not values or not _are_same(values, self._values):
            self._bind()
        contents = {
            name: {key: content(value, self._of_tensor) for key, value in bound.open.items() if is_small(value)}
            for name, bound in self._bound.items()
            if bound.open
        }
        return Look(self._bound, contents)

    def changed(self, before: Look, after: Look) -> set[tuple[str, str]]:
        """The names of modules and of their attributes and buffers that differ between two looks, or are new."""
        found: set[tuple[str, str]] = set()
        for name, bound in after.bound.items():
            was = before.bound[name]
            present, past = after.contents.get(name, {}), before.contents.get(name, {})
            if bound is not was:
                present, past = bound.fixed | present, was.fixed | past
            if present != past:
                found |= {(name, key) for key, value in present.items() if past.get(key) != value}
        return found

    def _bind(self) -> None:
        """Note anew what the attributes of each module are bound to, if that has changed."""
        pairs = [(vars(module), registered_buffers(module)) for _, module in self.modules]
        self._spaces = [space for pair in pairs for space in pair]
        self._values = [value for space in self._spaces for value in space.values()]
        bound: dict[str, _Bound] = {}
        for (name, _), (attributes, buffers) in zip(self.modules, pairs, strict=True):
            values, known = [*attributes.values(), *buffers.values()], self._bound.get(name)
            if known is not None and _are_same(values, known.values):
                bound[name] = known
                continue
            own = {key: value for key, value in (attributes | buffers).items() if key not in RESERVED}
            may_change = {k: v for k, v in own.items() if isinstance(v, _OPEN) or is_looked_into(v)}
            fixed = {
                k: content(v, self._of_tensor) for k, v in own.items() if isinstance(v, PLAIN) and k not in may_change
            }
            bound[name] = _Bound(values, fixed, may_change)
        self._bound = bound


def _are_same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


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
        self._before = self._watch.look()

    def end_pass(self) -> None:
        """Called after a pass."""
        before, self._before = self._before, self._watch.look()
        self._counts.update(self._watch.changed(before, self._before))

    def end_batch(self, step_name: str) -> list[str]:
        """The names of what several passes have changed; not what those of the step's first batch have, of which the trace and the trial tell."""
        names = [name_of(*key) for key, count in self._counts.items() if count > 1]
        known = self._known.setdefault(step_name, names)
        return [name for name in names if name not in known]
