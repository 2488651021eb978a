"""The values below a module that a step may change: its attributes, and those of objects that it holds.

    for path, value in each_value(module.meter, ("meter",), set()): ...    # ("meter",), ("meter", "total"), ("meter", "count")
    merge(module.table, received)                                          # in place: other code may hold the table, too

An object of a class of the user's is looked into, so that ``self.meter = AverageMeter()`` is the same as ``self.total`` and
``self.count``. Objects of libraries (tokenizers, configurations, loggers, data sets) are not: a step does not change them, and
some are large.
"""

import datetime
import enum
import pathlib
import sys
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_holmes.comm.wire import attributes_of, find_problem
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import FABRIC, TRAINER
from lightning_holmes.torch_private import MODULE_REGISTRIES

Path = tuple[str, ...]

_VALUES = (datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath, enum.Enum)
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic, Tensor, *_VALUES)
CONTAINERS: Any = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
CONTAINERS += (type(pl.LightningModule().hparams),)
_NOT_LOOKED_INTO = (
    nn.Module,
    Tensor,
    Dataset,
    DataLoader,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.GenericAlias,
)
_LIBRARIES = {
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_utilities", "lightning_holmes", "transformers", "tokenizers", "datasets", "peft", "accelerate"),
    *("omegaconf", "hydra", "wandb", "tensorboard", "mlflow", "numpy"),
}
_OF_VALUES = ("__main__", "argparse", "collections", "types")
"""Modules of the standard library whose classes only hold values."""
_MOST_DEEP = 40
_MOST_ENTRIES = 1000
_CONSTANTS = frozenset((type(None), bool, int, str, bytes))
"""Of these is nearly everything that a module holds. Floats need more care: a NaN is not equal to itself."""


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether ``value`` is a number, text, array or tensor, a container of these, or of objects that can be sent."""
    if isinstance(value, PLAIN):
        return not isinstance(value, nn.Parameter)
    if depth > _MOST_DEEP:
        return False
    if type(value) in CONTAINERS:
        inner = [*value, *value.values()] if isinstance(value, Mapping) else value
        return all(is_plain(v, depth + 1) or _can_be_sent(v, depth + 1) for v in inner)
    return isinstance(value, (dict, list, set, deque, tuple)) and _can_be_sent(value, depth)


def _can_be_sent(value: Any, depth: int) -> bool:
    """Whether an object can be sent as its class's name and its attributes."""
    kind = type(value)
    if is_of_library(kind) or isinstance(value, _NOT_LOOKED_INTO) or find_problem(kind) or depth > _MOST_DEEP:
        return False
    inner = [*attributes_of(value).values()]
    if isinstance(value, dict):
        inner += [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, (list, tuple, set, deque)):
        inner += [*value]
    return all(is_plain(v, depth + 1) or _can_be_sent(v, depth + 1) for v in inner)


def is_looked_into(value: Any) -> bool:
    """Whether ``value`` is an object whose attributes count as state of their own."""
    kind = type(value)
    if kind in _CONSTANTS or isinstance(value, (*PLAIN, *_NOT_LOOKED_INTO, *CONTAINERS)) or is_of_library(kind):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)


def is_of_library(kind: type) -> bool:
    """Whether a class is of torch, Lightning, another known library or the standard library."""
    return is_library(kind.__module__)


def is_library(name: str) -> bool:
    """Whether a file, by the name of its module, is of a library."""
    package = name.partition(".")[0]
    return package in _LIBRARIES or (package in sys.stdlib_module_names and package not in _OF_VALUES)


def each_value(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """``value`` if it is plain; otherwise, if it is an object that is looked into, the object and then its values.

    Args:
        seen: ids of objects that were looked into; one that is held twice is looked into once.
    """
    if is_plain(value):
        yield path, value
    elif len(path) <= _MOST_DEEP and is_looked_into(value) and id(value) not in seen:
        seen.add(id(value))
        yield path, value
        for name, attribute in attributes_of(value).items():
            yield from each_value(attribute, (*path, name), seen)


def is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether ``value`` is of one of these classes, and no iterator that is looked into, whose own iterators count."""
    return isinstance(value, kinds) and not (isinstance(value, Iterator) and is_looked_into(value))


def find_below(
    module: nn.Module, kinds: tuple[type, ...], replaced: Callable[[Any], Any] = lambda value: value
) -> dict[str, Any]:
    """The objects of these classes in the attributes of ``module`` and its submodules, and in containers and objects that they hold, by
    path (:func:`is_one_of`); not what is registered as a submodule. ``replaced``: returns what takes a found one's place."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def look(value: Any, path: str, holder: Any, key: Any) -> None:
        if is_one_of(value, kinds):
            found.setdefault(path, new := replaced(value))
            if new is value:
                return
            if isinstance(holder, (tuple, set, frozenset)):
                raise UnsupportedModuleError(
                    f"{path} is an iterator in a {type(holder).__name__}: keep it in a list or an attribute"
                )
            if isinstance(holder, (dict, list, deque)):
                holder[key] = new
            else:
                object.__setattr__(holder, key, new)
        elif id(value) not in seen and (type(value) in CONTAINERS or is_looked_into(value)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner: Any = value.items()
            elif type(value) in CONTAINERS:
                inner = enumerate(value) if len(value) <= _MOST_ENTRIES else ()
            else:
                inner = attributes_of(value).items()
            for name, each in list(inner):
                look(each, f"{path}.{name}", value, name)

    for name, part in module.named_modules():
        for key, value in list(vars(part).items()):
            if key not in (*MODULE_REGISTRIES, TRAINER, FABRIC):
                look(value, f"self.{name}.{key}" if name else f"self.{key}", vars(part), key)
    return found


def content(value: Any, of_tensor: Callable[[Tensor], Hashable]) -> Hashable:
    """A hashable description of ``value``, its containers and objects, which differs once any of them has changed; of what is neither
    plain, a container nor looked into it is the class. ``of_tensor`` describes a tensor."""
    return _described(value, of_tensor, {}, 0)


def _described(
    value: Any, of_tensor: Callable[[Tensor], Hashable], known: dict[int, tuple[int, Any]], depth: int
) -> Hashable:
    """See :func:`content`; ``known``: by id the containers and objects that are described already, each with its number: one that is held
    twice is described once."""
    kind = type(value)
    if kind in _CONSTANTS:
        return kind.__name__, value
    if kind is float:
        return "float", repr(value)
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, np.ndarray):
        return "array", value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, PLAIN):
        return kind.__name__, value if isinstance(value, _VALUES) else repr(value)
    is_held, is_object = isinstance(value, (*CONTAINERS, Mapping)), is_looked_into(value)
    if not (is_held or is_object) or depth > _MOST_DEEP:
        return kind.__name__
    if id(value) in known:
        return kind.__name__, known[id(value)][0]
    known[id(value)] = len(known), value
    held: list[Any] = []
    if isinstance(value, Mapping):
        held += [each for entry in value.items() for each in entry]
    elif is_held:
        held += value
    if is_object or kind not in CONTAINERS:
        held += [each for entry in attributes_of(value).items() for each in entry]
    return kind.__name__, tuple(_described(each, of_tensor, known, depth + 1) for each in held)


def merge(present: Any, received: Any) -> Any:
    """The value that takes the place of ``present``: ``present`` itself with the content of ``received`` where it can be changed in
    place, since other objects may hold it, too; otherwise ``received``."""
    if type(present) is not type(received) or isinstance(present, PLAIN):
        return received
    if isinstance(present, list):
        both = len(present) == len(received)
        present[:] = map(merge, present, received) if both else received
    elif isinstance(present, dict):
        merged = {key: merge(present[key], value) if key in present else value for key, value in received.items()}
        present.clear()
        for key, value in merged.items():
            present[key] = value
    elif isinstance(present, set):
        present.clear()
        present.update(received)
    elif isinstance(present, (tuple, frozenset, deque)) or not is_looked_into(present):
        return received
    if type(present) not in CONTAINERS:
        mine = attributes_of(present)
        for name, value in attributes_of(received).items():
            object.__setattr__(present, name, merge(mine.get(name), value))
    return present
