"""Watch Python values that a step sets on its module and reads elsewhere: counters, averages, dicts of numbers.

They do not pass through operators, so trace.py watches the attributes themselves: which ones a step changes, and where it
sets and reads them. Tensors are followed by trace.py; objects of other classes are not looked into.

    before = snapshot(module); step(); changed = changes(before, snapshot(module))
    watch = AttributeWatch(module, changed, here); step(); watch.finish()
    watch.uses[0].written, watch.uses[0].read
"""

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.lightning_private import FABRIC, TRAINER, UPDATE_COUNT
from lightning_holmes.pipeline import tree
from lightning_holmes.torch_private import MODULE_REGISTRIES

Place = tuple[int, bool]  # position (see structure.py), whether inside that layer

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type)
"""Values that are the same on every stage if they are the same on one."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_RESERVED = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | {"log", "all_gather", "forward"}
_MAX_ENTRIES = 10_000


@dataclass(slots=True, kw_only=True)
class Use:
    """Where one attribute's value was set and read; ``grew_at``: where it was set to a value other than the one before."""

    owner: str
    key: str
    written: set[Place] = field(default_factory=set)
    read: set[Place] = field(default_factory=set)
    grew_at: set[Place] = field(default_factory=set)

    @property
    def name(self) -> str:
        """``owner.key``."""
        return f"{self.owner}.{self.key}" if self.owner else self.key


def plain_content(value: Any, depth: int = 0) -> Hashable:
    """A hashable description of the Python values and NumPy arrays in ``value`` and its containers; tensors and other
    objects count by their class only."""
    if isinstance(value, _SCALARS):
        return type(value).__name__, repr(value)
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.tobytes() if value.nbytes < _MAX_ENTRIES else float(value.sum())
    if depth < 4 and isinstance(value, Mapping):
        return tuple((repr(k), plain_content(v, depth + 1)) for k, v in list(value.items())[:_MAX_ENTRIES])
    if depth < 4 and isinstance(value, (list, tuple, deque)):
        return len(value), tuple(plain_content(v, depth + 1) for v in list(value)[-_MAX_ENTRIES:])
    return type(value).__name__


def snapshot(module: nn.Module) -> dict[tuple[str, str], Hashable]:
    """The plain content of every attribute of ``module`` and its submodules; for metrics, the update count."""
    found: dict[tuple[str, str], Hashable] = {}
    for owner, part in module.named_modules():
        if isinstance(part, Metric):
            found[owner, UPDATE_COUNT] = part.update_count
            continue
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for key, value in vars(part).items():
            if key not in _RESERVED:
                found[owner, key] = plain_content(value)
    return found


def changes(before: Mapping[Any, Hashable], after: Mapping[Any, Hashable]) -> list[Any]:
    """The keys whose content differs, or that are new."""
    return [key for key, content in after.items() if key not in before or before[key] != content]


class AttributeWatch:
    """Records where the attributes ``keys`` of ``module`` are set and read, from now on.

    The submodules that hold them get new classes, so ``module`` must be a copy that nothing else uses.

    Args:
        here: returns the current place of the step.
    """

    def __init__(self, module: nn.Module, keys: Iterable[tuple[str, str]], here: Callable[[], Place]) -> None:
        self._here = here
        self.uses: list[Use] = []
        self._finishers: list[Callable[[], None]] = []
        for owner, key in keys:
            use = Use(owner=owner, key=key)
            self.uses.append(use)
            self._watch(module.get_submodule(owner), use)

    def finish(self) -> None:
        """Check the containers a last time, for what was put into them after they were last read."""
        for finisher in self._finishers:
            finisher()

    def _watch(self, part: nn.Module, use: Use) -> None:
        key, values = use.key, vars(part)
        last: list[Any] = [plain_content(values[key]) if key in values else None, self._here()]

        def notice() -> None:
            """If the content has changed, record that the place that last read or set the attribute has changed it."""
            content = plain_content(values.get(key))
            if content != last[0]:
                use.written.add(last[1])
                use.grew_at.add(last[1])
                last[0] = content

        def read(_: Any) -> Any:
            if key not in values:
                raise AttributeError(key)
            value = values[key]
            notice()
            use.read.add(self._here())
            if isinstance(value, Mapping):
                use.written.add(self._here())
            last[1] = self._here()
            return value

        def write(_: Any, value: Any) -> None:
            notice()
            values[key] = value
            use.written.add(self._here())
            last[1] = self._here()
            notice()

        def delete(_: Any) -> None:
            values.pop(key, None)
            use.written.add(self._here())

        part.__class__ = type(type(part).__name__, (type(part),), {key: property(read, write, delete)})
        self._finishers.append(notice)


def plain_parts(value: Any) -> Any:
    """The Python values in a layer's arguments, and those in the attributes of objects among them."""
    parts: list[Any] = []

    def look(_: Any, child: Any) -> Any:
        if tree.is_container(child):
            parts.append(len(child) if hasattr(child, "__len__") else 0)
            tree.map_children(look, child)
        elif isinstance(child, CONSTANTS):
            parts.append(repr(child))
        elif not isinstance(child, (Tensor, nn.Module)) and hasattr(child, "__dict__"):
            parts.append([(k, repr(v)) for k, v in vars(child).items() if isinstance(v, CONSTANTS)])
        return child

    look(None, value)
    return parts


def attribute_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module keeps as plain attributes, alone or in containers, by path."""
    found: dict[str, Tensor] = {}
    known: dict[int, list[Tensor]] = {}  # parts of a module share their configuration
    skip = (*MODULE_REGISTRIES, TRAINER, FABRIC)
    for name, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if key in skip or tree.is_empty(value):
                continue
            if id(value) not in known:
                known[id(value)] = tree.tensors_of(value)
            for index, tensor in enumerate(known[id(value)]):
                found[f"{name}.{key}.{index}" if name else f"{key}.{index}"] = tensor
    return found
