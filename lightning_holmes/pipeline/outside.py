"""State outside of a module that its steps may change: globals (``LOSSES.append(loss.item())``), variables of an enclosing function, and
attributes of classes, callbacks and the data module, files and queues that the module holds.

Only the rank of the last stage runs a step to its end. What the step changes on the module is brought to the other ranks (module_state.py);
what it changes elsewhere in or after its layers stays on that rank, so that such a step is refused where it is split into stages. What
it changes before its layers every stage changes alike. A value that is set once is a cache, of which each process has its own: an entry
that is added to a dict, a value in place of None.

Looked at is what the code of the module's classes names, and that of functions and classes that it names, in the user's own files.

    outside = Outside(module)
    outside.begin(); step()
    outside.written()                   # ["LOSSES of train"]
    with outside.preserved(): step()
"""

import functools
import io
import operator
import os
import queue
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_holmes.comm.wire import attributes_of
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline.attributes import RESERVED
from lightning_holmes.pipeline.object_state import (
    each_value,
    find_below,
    is_library,
    is_looked_into,
    is_of_library,
    is_plain,
)
from lightning_holmes.torch_private import tensor_version

CURE = "keep it on the module, in numbers, tensors, or lists of them (self.losses), which are brought to all ranks"
_HELD = (list, dict, set, deque, Tensor, np.ndarray)
_CODE = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, type, types.ModuleType, nn.Module)
_MOST_FUNCTIONS = 5000
_MOST_ENTRIES = 10_000
_MOST_THINGS = 2000
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_SMALL_BYTES = 1 << 16
_GONE = object()  # there is no such name


@dataclass(frozen=True, slots=True, eq=False)
class _Names:
    """Some names of a namespace: a file, a class, an enclosing function. ``where``: a format for the name in messages."""

    where: str
    names: set[str]
    get: Callable[[str], Any]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Was:
    """What a thing held; ``what``: its name, or a format for the names of its parts."""

    what: str
    thing: Any
    held: Any


class Outside:
    """What steps of ``module`` can change outside of it, as far as their code names it."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._package = type(module).__module__.partition(".")[0]
        self._finder: _Finder | None = None
        self._before: list[_Was] = []

    def begin(self) -> None:
        """Take the present state as known."""
        self._before = self._record()

    def written(self) -> list[str]:
        """What has been written since :meth:`begin`, other than what was set for the first time."""
        found = [(was, key) for was in self._before for key in _written(was.thing, was.held)]
        assert self._finder is not None
        own = _ids_below(self._module) - {*map(id, self._finder.unsent.values())} if found else set()
        return list(dict.fromkeys(was.what.format(key).rstrip(".") for was, key in found if id(was.thing) not in own))

    def has_changed(self) -> bool:
        """Whether anything differs from what it was at :meth:`begin`."""
        return any(not _is_same(was.thing, was.held) for was in self._before)

    def refuse_written(self, place: str) -> None:
        """Called after the forward or backward of one of several stages or microbatches.

        Raises:
            UnsupportedModuleError: it has changed something, which it had not when it was traced.
        """
        if written := self.written():
            raise UnsupportedModuleError(
                f"{place} changes {written[0]}, which is not brought to other ranks, and the trace of its first batch did not show that: only the "
                f"rank of this stage would see it, once for each microbatch; {CURE}, or use pipeline_parallel_size=1 and num_microbatches=1"
            )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put everything back on exit; of tensors and arrays small ones."""
        before = self._record(copies=True)
        try:
            yield
        finally:
            for was in before:
                if not _is_same(was.thing, was.held):
                    _put_back(was.thing, was.held)

    def _record(self, *, copies: bool = False) -> list[_Was]:
        if self._finder is None:
            self._finder = _Finder(self._package, self._module)
        found: list[_Was] = []
        seen: set[int] = set()
        for names in self._finder.names.values():
            self._remember(names, names.where, found, seen, copies=copies)
        objects = [*self._finder.objects.values()]
        if self._finder.uses_trainer and (trainer := trainer_of(self._module)) is not None:
            objects += [*trainer.callbacks, trainer.datamodule]
        for each in objects:
            if _is_own_object(each, self._package):
                self._remember(each, f"{type(each).__name__}.{{}}", found, seen, copies=copies)
        for path, each in self._finder.unsent.items():
            self._remember(each, f"{path}.{{}}", found, seen, copies=copies)
        return found

    def _remember(self, thing: Any, what: str, found: list[_Was], seen: set[int], *, copies: bool) -> None:
        """Add to ``found`` what ``thing``, and each thing below it, holds; ``copies``: with the values of small tensors."""
        if id(thing) in seen or len(found) >= _MOST_THINGS:
            return
        seen.add(id(thing))
        held = _held(thing, copies=copies)
        found.append(_Was(what, thing, held))
        parts = held.items() if isinstance(held, dict) else [("", p) for p in held] if isinstance(held, list) else []
        for name, value in parts if len(parts) <= _MOST_ENTRIES else ():
            if type(value) is not nn.Parameter and (isinstance(value, _HELD) or _is_own_object(value, self._package)):
                self._remember(value, what.format(name), found, seen, copies=copies)


class _Finder:
    """Finds the names outside of a module that its code can reach.

    ``objects``: those whose methods are among its functions, such as hooks of layers. ``uses_trainer``: whether the code names
    callbacks or the data module. ``unsent``: by path, what the module holds and cannot be brought to other ranks.
    """

    def __init__(self, package: str, module: nn.Module) -> None:
        self._package = package
        self.names: dict[int, _Names] = {}
        self.objects: dict[int, Any] = {}
        self._classes: dict[type, None] = {}
        self._functions: list[types.FunctionType] = []
        self._tables: set[int] = set()
        for part in module.modules():
            self._add_class(type(part))
            for key, value in vars(part).items():
                if "hooks" in key or (type(part) in self._classes and key != "_compile_kwargs"):
                    self._add(value)
        table = getattr(sys.modules.get("wandb"), "Table", Dataset)
        self.unsent = find_below(module, (Dataset, table, io.IOBase, queue.Queue)) | _unsent_containers(module)
        seen: set[types.FunctionType] = set()
        named: set[str] = set()
        while self._functions and len(seen) < _MOST_FUNCTIONS:
            function = self._functions.pop()
            if function not in seen:
                seen.add(function)
                names = names_in(function.__code__)
                named |= names
                self._look_up(function, names)
        for kind in list(self._classes):
            get, put = (lambda name, kind=kind: vars(kind).get(name, _GONE)), functools.partial(setattr, kind)
            for name in vars(kind).keys() & named:
                self._found(kind, f"{kind.__qualname__}.{{}}", name, get, put)
        self.uses_trainer = not named.isdisjoint(("callbacks", "datamodule"))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base not in self._classes and _is_own(base.__module__, self._package):
                self._classes[base] = None
                for value in vars(base).values():
                    self._add(value)

    def _add(self, value: Any) -> None:
        """Note the code of a value, and of values in a container, which may name other values."""
        if isinstance(value, types.MethodType) and _is_own_object(value.__self__, self._package):
            self.objects[id(value.__self__)] = value.__self__
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            self._add(value.__func__)
        elif isinstance(value, (property, functools.partial)):
            for each in (value.fget, value.fset) if isinstance(value, property) else (value.func,):
                self._add(each)
        elif isinstance(value, types.FunctionType):
            self._add(getattr(value, "__wrapped__", None))
            if _is_own(value.__globals__.get("__name__", ""), self._package):  # a decorator may change __module__
                self._functions.append(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, (list, tuple, dict)) and id(value) not in self._tables and len(value) <= _MOST_ENTRIES:
            self._tables.add(id(value))
            for each in value.values() if isinstance(value, dict) else value:
                self._add(each)
        elif _is_own_object(value, self._package):
            self._add_class(type(value))

    def _look_up(self, function: types.FunctionType, names: set[str]) -> None:
        spaces = [function.__globals__]
        files = [value for name in names if isinstance(value := spaces[0].get(name), types.ModuleType)]
        spaces += [vars(file) for file in files if _is_own(file.__name__, self._package)]
        for space in spaces:
            where = f"{{}} of {space.get('__name__', 'a file')}"
            for name in names & space.keys():
                self._found(space, where, name, lambda name, of=space: of.get(name, _GONE), space.__setitem__)  # type: ignore[misc]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            where, get = f"{name} around {function.__qualname__}", functools.partial(_content_of, cell)
            self._found(cell, where, "cell_contents", get, functools.partial(setattr, cell))

    def _found(
        self, space: Any, where: str, name: str, get: Callable[[str], Any], put: Callable[[str, Any], None]
    ) -> None:
        value = get(name)
        self._add(value)
        if not (name.startswith("__") or isinstance(value, (*_CODE, types.MemberDescriptorType))):
            drop = space.pop if isinstance(space, dict) else functools.partial(delattr, space)
            self.names.setdefault(id(space), _Names(where, set(), get, put, drop)).names.add(name)


def _unsent_containers(module: nn.Module) -> dict[str, Any]:
    """The lists, dicts, sets and deques that modules hold and that have entries which cannot be sent, by path."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if not is_of_library(type(part)):
            for key, value in vars(part).items():
                if key not in RESERVED and type(value) in _HELD and not is_plain(value) and len(value) <= _MOST_ENTRIES:
                    found[f"self.{name}.{key}" if name else f"self.{key}"] = value
    return found


def _is_own(name: str, package: str) -> bool:
    """Whether a file, by the name of its module, is the user's: of the ``package`` of the module that runs, or not installed."""
    own = name.partition(".")[0]
    return own == package or not (is_library(name) or _is_installed(own))


@functools.cache
def _is_installed(package: str) -> bool:
    return (getattr(sys.modules.get(package), "__file__", None) or "").startswith(_INSTALLED)


def _is_own_object(value: Any, package: str) -> bool:
    return is_looked_into(value) and _is_own(type(value).__module__, package)


def _content_of(cell: types.CellType, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def names_in(code: types.CodeType) -> set[str]:
    """The names that a function and its inner functions use, but for variables of their own."""
    return set(code.co_names).union(*(names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _ids_below(module: nn.Module) -> set[int]:
    """The ids of what a module holds, which is watched as its state."""
    looked: set[int] = set()
    values = [value for part in module.modules() for value in vars(part).values()]
    return {id(value) for value in values} | {id(v) for value in values for _, v in each_value(value, (), looked)}


def _held(thing: Any, *, copies: bool = False) -> Any:
    """The parts of a thing, a dict if they have names; of a tensor its version and values, of an array its values, of a long list its length,
    of a file its position."""
    if isinstance(thing, _Names):
        return {name: value for name in thing.names if (value := thing.get(name)) is not _GONE}
    if isinstance(thing, Tensor):
        return tensor_version(thing), thing.detach().clone() if copies and thing.nbytes <= _SMALL_BYTES else None
    if isinstance(thing, np.ndarray):
        return thing.copy() if thing.nbytes <= _SMALL_BYTES else None
    if isinstance(thing, io.IOBase):
        return _position(thing)
    if isinstance(thing, list) and len(thing) > _MOST_ENTRIES:
        return len(thing)
    for kind, copied in ((dict, dict), (set, set), (list, list), (deque, list)):
        if isinstance(thing, kind):
            return copied(thing)
    return attributes_of(thing)


def _position(file: io.IOBase) -> int | None:
    """The position in a file; None if it has none now: it is closed, a pipe, or iterated over."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return None


def _written(thing: Any, held: Any) -> list[Any]:
    """The names of the parts that have been written, other than those that are new or were None; [""] for a thing without names."""
    if isinstance(thing, Tensor):
        is_written = tensor_version(thing) != held[0]
    elif isinstance(thing, np.ndarray):
        is_written = held is not None and thing.tobytes() != held.tobytes()
    elif held is None or isinstance(held, int):
        is_written = _held(thing) != held
    elif isinstance(held, dict):
        now = _held(thing)
        return [name for name in _changed(held, now) if held[name] is not None]
    else:
        now = _held(thing)
        is_written = (
            now != held if isinstance(held, set) else len(now) != len(held) or any(map(operator.is_not, now, held))
        )
    return [""] if is_written else []


def _is_same(thing: Any, held: Any) -> bool:
    if not isinstance(held, dict):
        return not _written(thing, held)
    now = _held(thing)
    return len(now) == len(held) and not _changed(held, now)


def _changed(held: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    """The names of parts that are gone, or are other objects now."""
    return [name for name, part in held.items() if now.get(name, _GONE) is not part]


def _put_back(thing: Any, held: Any) -> None:
    if isinstance(thing, Tensor):
        if held[1] is not None:
            with torch.no_grad():
                thing.copy_(held[1])
    elif isinstance(thing, np.ndarray):
        thing[...] = held
    elif isinstance(thing, io.IOBase):
        if held is not None and not thing.closed:
            thing.seek(held)  # and never cut: others may have written to it
    elif isinstance(held, int):
        del thing[held:]
    elif isinstance(thing, (set, dict, list, deque)):
        thing.clear()
        (thing.update if isinstance(thing, (set, dict)) else thing.extend)(held)
    else:
        set_part, drop_part = functools.partial(object.__setattr__, thing), functools.partial(object.__delattr__, thing)
        put, drop = (thing.put, thing.drop) if isinstance(thing, _Names) else (set_part, drop_part)
        now = _held(thing)
        for name in now.keys() - held.keys():
            drop(name)
        for name in _changed(held, now):
            put(name, held[name])
