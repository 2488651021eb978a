"""State outside of a module that its steps may change: globals (``LOSSES.append(loss.item())``), variables of an enclosing function, and
attributes of classes, callbacks and the data module.

Only the rank of the last stage runs a step to its end. What the step changes on the module is brought to the other ranks (module_state.py);
what it changes elsewhere in or after its layers stays on that rank, so that such a step is refused where it is split into stages. What
it changes before its layers every stage changes alike. A value that is set once is a cache, of which each process has its own: an entry
that is added to a dict, a value in place of None.

Looked at is what the code of the module's classes names, and that of the functions and classes that it names.

    outside = Outside(module)
    outside.begin(); step()
    outside.written()           # ["LOSSES of train.py"]
    with outside.preserved(): step()
"""

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_holmes.comm.wire import attributes_of
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline.object_state import each_value, is_library, is_looked_into, is_of_library
from lightning_holmes.torch_private import tensor_version

CURE = "keep it on the module (self.losses), from which it is brought to all ranks"
_MUTABLE = (list, dict, set, deque)
_DESCRIPTORS = (types.FunctionType, staticmethod, classmethod, property, types.MethodType, types.MemberDescriptorType)
_MOST_FUNCTIONS = 5000
_MOST_ENTRIES = 10_000
_SMALL_BYTES = 1 << 16
_GONE = object()


@dataclass(frozen=True, slots=True, eq=False)
class _Names:
    """Some names of a namespace: globals of a file, attributes of a class, variables of a function. ``where``: in words, with a place for a name."""

    where: str
    names: set[str]
    get: Callable[[str], Any]  # _GONE if there is no such name
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def read(self) -> dict[str, Any]:
        return {name: value for name in self.names if (value := self.get(name)) is not _GONE}


@dataclass(frozen=True, slots=True)
class _Was:
    """What one thing held, and what it is called."""

    what: str
    thing: Any
    held: Any


class Outside:
    """What steps of ``module`` can change outside of it, as far as their code names it; found at the first use."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._names: list[_Names] | None = None
        self._uses_trainer = False
        self._before: list[_Was] = []

    def begin(self) -> None:
        """Take the present state as known."""
        self._before = self._record()

    def written(self) -> list[str]:
        """What has been written since :meth:`begin`, other than what was set for the first time."""
        found = [was.what.format(key) for was in self._before for key in _written(was.thing, was.held)]
        return list(dict.fromkeys(found))

    def has_changed(self) -> bool:
        """Whether anything differs from what it was at :meth:`begin`."""
        return any(not _is_same(was.thing, was.held) for was in self._before)

    def refuse_written(self, place: str) -> None:
        """Called after a forward of one of several stages or microbatches.

        Raises:
            UnsupportedModuleError: it has changed something, which it had not when it was traced.
        """
        if written := self.written():
            raise UnsupportedModuleError(
                f"{place} changes {written[0]}, outside of the module, and did not when it was traced on its first batch: only the rank of "
                f"this stage would see it, once for each microbatch; {CURE}, or use pipeline_parallel_size=1 and num_microbatches=1"
            )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put everything back on exit."""
        before = self._record(copies=True)
        try:
            yield
        finally:
            for was in before:
                if not _is_same(was.thing, was.held):
                    _put_back(was.thing, was.held)

    def _record(self, *, copies: bool = False) -> list[_Was]:
        if self._names is None:
            self._names, self._uses_trainer = _Finder(self._module).find()
        found: list[_Was] = []
        seen = _ids_below(self._module)
        for names in self._names:
            _remember(names, names.where, found, seen, copies=copies)
        trainer = trainer_of(self._module) if self._uses_trainer else None
        if trainer is not None:
            for each in (*trainer.callbacks, trainer.datamodule):
                if is_looked_into(each):
                    _remember(each, f"{type(each).__name__}.{{}}", found, seen, copies=copies)
        return found


class _Finder:
    """Finds the names outside of a module that its code can reach."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_namespace: dict[int, _Names] = {}
        self._classes: dict[type, None] = {}
        self._functions: list[types.FunctionType] = []
        self._seen: set[types.CodeType] = set()

    def find(self) -> tuple[list[_Names], bool]:
        for part in self._module.modules():
            self._add_class(type(part))
            for value in vars(part).values():
                self._add(value)
        named: set[str] = set()
        while self._functions and len(self._seen) < _MOST_FUNCTIONS:
            function = self._functions.pop()
            if function.__code__ not in self._seen:
                self._seen.add(function.__code__)
                names = _names_in(function.__code__)
                named |= names
                self._look_up(function, names)
        for kind in self._classes:
            own = {n for n in vars(kind).keys() & named if not (n.startswith("__") or _is_code(vars(kind)[n]))}
            if own:
                self._by_namespace[id(kind)] = _Names(
                    f"{kind.__qualname__}.{{}}",
                    own,
                    lambda name, kind=kind: vars(kind).get(name, _GONE),  # type: ignore[misc]
                    lambda name, value, kind=kind: setattr(kind, name, value),  # type: ignore[misc]
                    lambda name, kind=kind: delattr(kind, name),  # type: ignore[misc]
                )
        return list(self._by_namespace.values()), not named.isdisjoint(("callbacks", "datamodule"))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base not in self._classes and not is_of_library(base):
                self._classes[base] = None
                for value in vars(base).values():
                    self._add(value)

    def _add(self, value: Any) -> None:
        """Note the code that a value has, which may name other values."""
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        if isinstance(value, property):
            self._add(value.fget)
            self._add(value.fset)
        elif isinstance(value, types.FunctionType):
            if not is_library(value.__module__ or ""):
                self._functions.append(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif is_looked_into(value):
            self._add_class(type(value))

    def _look_up(self, function: types.FunctionType, names: set[str]) -> None:
        space = function.__globals__
        for name in names & space.keys():
            value = space[name]
            if not isinstance(value, types.ModuleType):
                self._found(space, name, value)
            elif not is_library(value.__name__):
                for inner in names & vars(value).keys():
                    self._found(vars(value), inner, vars(value)[inner])
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            value = _content_of(cell)
            self._add(value)
            if not _is_code(value):
                self._by_namespace[id(cell)] = _Names(
                    f"{{}} around {function.__qualname__}",
                    {name},
                    lambda _, cell=cell: _content_of(cell),  # type: ignore[misc]
                    lambda _, value, cell=cell: setattr(cell, "cell_contents", value),  # type: ignore[misc]
                    lambda _, cell=cell: delattr(cell, "cell_contents"),  # type: ignore[misc]
                )

    def _found(self, space: dict[str, Any], name: str, value: Any) -> None:
        self._add(value)
        if not (name.startswith("__") or _is_code(value)):
            known = self._by_namespace.setdefault(
                id(space),
                _Names(
                    f"{{}} of {space.get('__name__', 'a file')}",
                    set(),
                    lambda name: space.get(name, _GONE),
                    space.__setitem__,
                    lambda name: space.pop(name, None),
                ),
            )
            known.names.add(name)


def _is_code(value: Any) -> bool:
    return isinstance(value, (*_DESCRIPTORS, type, types.ModuleType, nn.Module))


def _names_in(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _names_in(each)
    return found


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _ids_below(module: nn.Module) -> set[int]:
    """The ids of what a module holds, which is watched as its state."""
    seen: set[int] = set()
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, _MUTABLE):
                seen.add(id(value))
            elif is_looked_into(value):
                for _ in each_value(value, (), seen):
                    pass
    return seen


def _remember(thing: Any, what: str, found: list[_Was], seen: set[int], *, copies: bool) -> None:
    """Add what ``thing``, and each thing below it, holds now to ``found``. ``what``: its name, or a format for the names of its parts;
    ``copies``: with the values of small tensors."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    held = _held(thing, copies=copies)
    found.append(_Was(what, thing, held))
    if isinstance(held, dict):
        parts = list(held.items())
    else:
        parts = [("", each) for each in held] if isinstance(held, (list, set)) else []
    for name, value in parts if len(parts) <= _MOST_ENTRIES else ():
        is_held = isinstance(value, (*_MUTABLE, Tensor, np.ndarray)) or is_looked_into(value)
        if is_held and not isinstance(value, nn.Parameter):
            _remember(value, what.format(name), found, seen, copies=copies)


def _held(thing: Any, *, copies: bool = False) -> Any:
    """What a thing holds: a dict of its parts, a list, a set; of a tensor its version and of a small tensor or array the values."""
    if isinstance(thing, _Names):
        return thing.read()
    if isinstance(thing, Tensor):
        return tensor_version(thing), thing.detach().clone() if copies and thing.nbytes <= _SMALL_BYTES else None
    if isinstance(thing, np.ndarray):
        return thing.copy() if thing.nbytes <= _SMALL_BYTES else None
    if isinstance(thing, (dict, set)):
        return dict(thing) if isinstance(thing, dict) else set(thing)
    return list(thing) if isinstance(thing, (list, deque)) else attributes_of(thing)


def _written(thing: Any, held: Any) -> list[Any]:
    """The names of the parts that have been written, other than those that are new or were None; [""] for a thing without names."""
    if isinstance(thing, Tensor):
        return [""] if tensor_version(thing) != held[0] else []
    if isinstance(thing, np.ndarray):
        return [""] if held is not None and thing.tobytes() != held.tobytes() else []
    now = _held(thing)
    if isinstance(held, dict):
        return [key for key, value in held.items() if value is not None and now.get(key, _GONE) is not value]
    if isinstance(held, list):
        return [] if len(now) == len(held) and all(map(operator.is_, now, held)) else [""]
    return [""] if now != held else []


def _is_same(thing: Any, held: Any) -> bool:
    if not isinstance(held, dict):
        return not _written(thing, held)
    now = _held(thing)
    return now.keys() == held.keys() and all(map(operator.is_, now.values(), map(held.get, now)))


def _put_back(thing: Any, held: Any) -> None:
    if isinstance(thing, Tensor):
        if held[1] is not None:
            with torch.no_grad():
                thing.copy_(held[1])
    elif isinstance(thing, np.ndarray):
        thing[...] = held
    elif isinstance(thing, list):
        thing[:] = held
    elif isinstance(thing, (set, dict)):
        thing.clear()
        thing.update(held)
    elif isinstance(thing, deque):
        thing.clear()
        thing.extend(held)
    else:
        put, drop = (
            (thing.put, thing.drop)
            if isinstance(thing, _Names)
            else (functools.partial(object.__setattr__, thing), functools.partial(object.__delattr__, thing))
        )
        for name in _held(thing).keys() - held.keys():
            drop(name)
        for name, value in held.items():
            put(name, value)
