"""Watch Python values that a step sets on its module and reads elsewhere: counters, averages, dicts of numbers.

They do not pass through operators, so trace.py watches the attributes themselves, and those of objects that the module holds
(object_state.py): which ones a step changes, and where it sets and reads them. Tensors are followed by trace.py.

    before = snapshot(copy); step(); changed = changes(before, snapshot(copy))
    watch = AttributeWatch(copy, changed, here, module); step(); watch.finish()
    watch.uses[0].written, watch.uses[0].read
"""

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm.wire import attributes_of
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import FABRIC, TRAINER, UPDATE_COUNT
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.object_state import Path, content, each_value, is_looked_into
from lightning_holmes.pipeline.structure import BEFORE
from lightning_holmes.torch_private import MODULE_REGISTRIES

Place = tuple[int, bool]  # position (see structure.py), whether inside that layer

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type)
"""Values that are the same on every stage if they are the same on one."""
RESERVED = frozenset(vars(pl.LightningModule())) | frozenset(vars(nn.Module())) | {"log", "all_gather", "forward"}
"""Attributes of every module, which are not the user's."""


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


def name_of(*parts: str) -> str:
    """The name of a value below a module, from the names of the owner (maybe empty) and of what leads to it."""
    return ".".join(filter(None, parts))


def plain_content(value: Any) -> Hashable:
    """A hashable description of the Python values and NumPy arrays in ``value``; tensors count by their class only."""
    return content(value, lambda tensor: type(tensor).__name__)


def snapshot(module: nn.Module) -> dict[tuple[str, Path], Hashable]:
    """The plain content of every attribute of ``module`` and its submodules, and of objects that they hold; for metrics, the update count."""
    found: dict[tuple[str, Path], Hashable] = {}
    seen: set[int] = set()
    for owner, part in module.named_modules():
        if isinstance(part, Metric):
            found[owner, (UPDATE_COUNT,)] = part.update_count
            continue
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for key, value in vars(part).items():
            if key not in RESERVED:
                found[owner, (key,)] = _own_content(value)
                found |= {(owner, path): _own_content(inner) for path, inner in each_value(value, (key,), seen)}
    return found


def _own_content(value: Any) -> Hashable:
    """The content of a value without that of an object's attributes, which are values of their own."""
    return (type(value).__name__, id(value)) if is_looked_into(value) else plain_content(value)


def value_at(module: nn.Module, owner: str, path: Path) -> Any:
    """The value at ``path`` below the submodule ``owner``; None if it is gone."""
    value: Any = module.get_submodule(owner)
    for key in path:
        value = attributes_of(value).get(key)
    return value


def changes(before: Mapping[Any, Hashable], after: Mapping[Any, Hashable]) -> list[Any]:
    """The keys whose content differs, or that are new."""
    return [key for key, found in after.items() if key not in before or before[key] != found]


class AttributeWatch:
    """Records where the attributes ``keys`` of ``module`` are set and read, from now on.

    The submodules and objects that hold them get new classes, so ``module`` must be a copy that nothing else uses. An object that the
    copy shares with ``original``, or that can have no other class, is watched as a whole.

    Args:
        here: returns the current place of the step; None outside of it, where reads do not count.
    """

    def __init__(
        self, module: nn.Module, keys: Iterable[tuple[str, Path]], here: Callable[[], Place | None], original: nn.Module
    ) -> None:
        self._here = here
        self.uses: list[Use] = []
        self._finishers: list[Callable[[], None]] = []
        watched: set[tuple[str, Path]] = set()
        for owner, path in keys:
            part, length = _holder(module.get_submodule(owner), original.get_submodule(owner), path)
            if (owner, path[:length]) not in watched:
                watched.add((owner, path[:length]))
                use = Use(owner=name_of(owner, *path[: length - 1]), key=path[length - 1])
                self.uses.append(use)
                self._watch(part, use)

    def finish(self) -> None:
        """Check the containers a last time, for what was put into them after they were last read."""
        for finisher in self._finishers:
            finisher()

    def _watch(self, part: Any, use: Use) -> None:
        key, values = use.key, vars(part)
        last: list[Any] = [plain_content(values[key]) if key in values else None, (BEFORE, False)]

        def notice() -> None:
            """If the content has changed, record that the place that last read or set the attribute has changed it."""
            found = plain_content(values.get(key))
            if found != last[0] and last[1] is not None:
                use.written.add(last[1])
                use.grew_at.add(last[1])
                last[0] = found

        def read(_: Any) -> Any:
            if key not in values:
                raise AttributeError(key)
            value, here = values[key], self._here()
            if here is not None:
                notice()
                use.read.add(here)
                if isinstance(value, Mapping):
                    use.written.add(here)
                last[1] = here
            return value

        def write(_: Any, value: Any) -> None:
            notice()
            values[key] = value
            last[1] = self._here()
            if last[1] is not None:
                use.written.add(last[1])
            notice()

        def delete(_: Any) -> None:
            values.pop(key, None)
            if (here := self._here()) is not None:
                use.written.add(here)

        part.__class__ = _made_from(type(part), {key: property(read, write, delete)})
        self._finishers.append(notice)


def _holder(part: Any, original: Any, path: Path) -> tuple[Any, int]:
    """The object that holds the value at ``path`` below ``part`` and can be given another class, and the length of its key's path."""
    for length, key in enumerate(path[:-1], start=1):
        inner, own = attributes_of(part).get(key), attributes_of(original).get(key)
        if inner is own or not hasattr(inner, "__dict__") or not _takes_class(inner):
            return part, length
        part, original = inner, own
    return part, len(path)


def _takes_class(value: Any) -> bool:
    """Whether an object can be given a class of another's layout."""
    kind = type(value)
    try:
        value.__class__ = _made_from(kind, {})
        value.__class__ = kind
    except TypeError:
        return False
    return True


def plain_parts(value: Any) -> Any:
    """The Python values in a layer's arguments, and those in the attributes of objects among them."""
    if tree.is_container(value):
        length = len(value) if hasattr(value, "__len__") else 0
        return length, [plain_parts(child) for _, child in tree.children_of(value)]
    if isinstance(value, CONSTANTS):
        return repr(value)
    if not isinstance(value, (Tensor, nn.Module)) and hasattr(value, "__dict__"):
        return [(key, repr(inner)) for key, inner in vars(value).items() if isinstance(inner, CONSTANTS)]
    return None


def attribute_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module keeps as plain attributes, alone, in containers or in objects: by the value's name and a number."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    known: dict[int, list[tuple[Path, list[Tensor]]]] = {}  # parts of a module share their configuration
    skip = (*MODULE_REGISTRIES, TRAINER, FABRIC)
    for name, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if key in skip or tree.is_empty(value):
                continue
            if id(value) not in known:
                below = each_value(value, (), seen) if is_looked_into(value) else [((), value)]
                known[id(value)] = [(path, tree.tensors_of(inner)) for path, inner in below]
            each = ((name_of(name, key, *path), tensors) for path, tensors in known[id(value)])
            found |= {f"{place}.{number}": tensor for place, tensors in each for number, tensor in enumerate(tensors)}
    return found


def _made_from(kind: type, more: dict[str, Any]) -> type:
    """Return a class with ``more`` that has the names of ``kind``: transformers looks for settings by a class's text."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **more})
