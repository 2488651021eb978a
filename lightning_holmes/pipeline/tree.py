"""Trees of tensors: the nested containers that batches and layer outputs are made of.

A tree is a tensor, or a mapping, list, tuple, named tuple or dataclass of trees; anything else (also a set) is a
constant. A batch may also have objects of other classes that hold tensors (graphs): :func:`named_tensors` and
:func:`map_all_tensors` look into these, too. torch has the same under ``torch.utils._pytree``, which is private; the few
functions needed here are small.

    >>> template, leaves = flatten({"x": torch.ones(2), "n": 3})
    >>> template
    {'x': Leaf(index=0), 'n': 3}
    >>> unflatten(template, leaves)["n"]
    3
"""

import copy
import dataclasses
import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a template: ``index`` counts the tensors in the order of :func:`flatten`."""

    index: int


_PLAIN = frozenset((type(None), bool, int, float, str))
_BUILT_IN = frozenset((list, tuple, dict, OrderedDict))
_FUNCTIONS = (types.ModuleType, types.FunctionType, types.MethodType)
_NO_OBJECTS = (Tensor, nn.Module, type, enum.Enum, Dataset, DataLoader, Leaf, *_FUNCTIONS)


def is_named_tuple(value: Any) -> bool:
    """Whether ``value`` is an instance of a ``typing.NamedTuple`` or ``collections.namedtuple``."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_children(function: Callable[[Any, Any], Any], value: Any) -> Any:
    """Rebuild a container with ``function(key, child)`` in place of each child; anything else comes back as it is.

    Subclasses keep their type: mappings (``UserDict`` too, so a Hugging Face ``BatchEncoding`` stays one)
    and dataclasses are copied shallowly and then filled.
    """
    if isinstance(value, Mapping):
        rebuilt: Any = copy.copy(value)
        for key in list(value.keys()):
            child = value[key]
            changed = function(key, child)
            if changed is not child:
                rebuilt[key] = changed
        return rebuilt
    if is_named_tuple(value):
        return type(value)(*(function(key, child) for key, child in zip(value._fields, value, strict=True)))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        children = [function(index, child) for index, child in enumerate(value)]
        return children if type(value) is list else type(value)(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, function(field.name, getattr(value, field.name)))
        return rebuilt
    return value


def is_container(value: Any) -> bool:
    """Whether :func:`map_children` would look inside ``value``."""
    if isinstance(value, (Mapping, list, tuple)):
        return not isinstance(value, torch.Size)
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Leaf))


def is_empty(value: Any) -> bool:
    """Whether ``value`` is a constant or an empty container, by its exact class alone. Most attributes of modules
    are, and a check against an abstract class takes microseconds."""
    return type(value) in _PLAIN or (type(value) in _BUILT_IN and not value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A copy of the tree ``value`` with ``function(tensor)`` in place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    return map_children(lambda _, child: map_tensors(function, child), value)


def each_tensor(value: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in the order of :func:`flatten`."""
    if is_empty(value):
        return
    kind = type(value)
    if kind in (tuple, list):  # the most common classes
        for child in value:
            yield from each_tensor(child)
    elif kind in (dict, OrderedDict):
        for child in list(value.values()):
            yield from each_tensor(child)
    elif isinstance(value, Tensor):
        yield value
    elif is_container(value):
        for _, child in children_of(value):
            yield from each_tensor(child)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of :func:`flatten`."""
    return list(each_tensor(value))


def is_object(value: Any) -> bool:
    """Whether ``value`` is an object, not a container, whose attributes may hold tensors."""
    return hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS) and not is_container(value)


def children_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys and children of a container, or the attributes of an object."""
    if is_object(value):
        return list(vars(value).items())
    found: list[tuple[Any, Any]] = []
    map_children(lambda key, child: found.append((key, child)) or child, value)  # type: ignore[func-returns-value]
    return found


def named_tensors(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, also those in objects of other classes, by path.

    Args:
        seen: ids of objects to skip; those that are visited are added.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) not in seen:
        if is_object(value):
            seen.add(id(value))
        for key, child in children_of(value):
            yield from named_tensors(child, f"{path}[{key!r}]", seen)


def map_all_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Like :func:`map_tensors`; objects of other classes that hold tensors are copied, with ``function(tensor)`` for each."""
    if isinstance(value, Tensor):
        return function(value)
    if is_object(value):
        memo = {id(tensor): function(tensor) for _, tensor in named_tensors(value, "")}
        return copy.deepcopy(value, memo) if memo else value
    return map_children(lambda _, child: map_all_tensors(function, child), value)


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """A tree's template, in which a :class:`Leaf` stands for each tensor, and the tensors themselves."""
    leaves: list[Tensor] = []

    def take(tensor: Tensor) -> Leaf:
        leaves.append(tensor)
        return Leaf(len(leaves) - 1)

    return map_tensors(take, value), leaves


def unflatten(template: Any, leaves: list[Tensor]) -> Any:
    """The tree of ``template`` with ``leaves`` in their places."""
    if isinstance(template, Leaf):
        return leaves[template.index]
    return map_children(lambda _, child: unflatten(child, leaves), template)


def first_shape(value: Any) -> tuple[int, ...]:
    """The shape of a tree's first tensor; () where it has none."""
    first = next(each_tensor(value), None)
    return () if first is None else tuple(first.shape)


def same_template(left: Any, right: Any) -> bool:
    """Whether two templates have the same containers and the same constants, as far as these can be compared."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Leaf) or not is_container(left):
        try:
            return bool(left == right) or not isinstance(left, (bool, int, float, str, Leaf))
        except Exception:
            return True
    mine, theirs = dict(children_of(left)), dict(children_of(right))
    return mine.keys() == theirs.keys() and all(same_template(mine[k], theirs[k]) for k in mine)


def describe(template: Any) -> str:
    """Describe a template in a few words."""
    text = str(map_children(lambda _, c: "tensor" if isinstance(c, Leaf) else c, template))
    return "a tensor" if isinstance(template, Leaf) else text[:120]
