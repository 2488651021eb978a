"""A digest of everything that a module's costs depend on, the same in every process that builds the same module.

    digest_module(module)        # 32 hex digits; None where the source of a class cannot be found

The digest covers the facts that ranks compare (agreement.py), the hyperparameters and attributes of all submodules, and the source files of their
classes and bases, except torch's and Lightning's, whose versions are compared instead. An attribute counts by its value if it
is a number, a string, a type, or contains nothing else; tensors by shape and dtype, functions by their name and file, and any other
object by its class alone. Values that a module reads elsewhere (globals of other files, the environment) are not covered.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.strategy.agreement import module_facts

_VERSIONED = ("builtins", "torch", "lightning")  # packages whose versions are compared elsewhere
_LIGHTNING = ("lightning", "pytorch_lightning")
_LONG = 1000  # of a longer list, only this many elements and the length count
_PLAIN = (numbers.Number, enum.Enum, bytes, np.dtype, torch.dtype, torch.device, torch.layout, PurePath)


def digest_module(module: LightningModule) -> str | None:
    """Return the digest; None if the source of a class cannot be found, as for one typed at a prompt, or if an attribute cannot be read."""
    reader = _Reader()
    try:
        attributes = {
            name: [[key, reader.read(value)] for key, value in sorted(_own_attributes(submodule).items())]
            for name, submodule in module.named_modules()
        }
        classes = reader.classes.union(type(submodule) for submodule in module.modules())
        sources = sorted({*map(_source, _with_bases(classes)), *map(_source, reader.functions)})
    except Exception:  # if a user's object raises any error here, the run continues, and its costs are not cached
        return None
    facts = [module_facts(module), attributes, sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes other than those that torch and Lightning give to every module; ``training`` is included."""
    kinds = [cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule" and _package(cls) in _LIGHTNING]
    common = vars((kinds or [nn.Module])[0]())
    return {name: value for name, value in vars(module).items() if name == "training" or name not in common}


def _with_bases(classes: set[type]) -> Iterator[type]:
    for base in {base for cls in classes for base in cls.__mro__}:
        if _package(base) not in _VERSIONED:
            yield base


def _package(made: type | FunctionType) -> str:
    return made.__module__.partition(".")[0]


def _source(made: type | FunctionType) -> tuple[str, str]:
    """Return the name of a class or function, and a digest of its file."""
    path = inspect.getsourcefile(made) or inspect.getfile(made)
    return made.__qualname__, hashlib.sha256(Path(path).read_bytes()).hexdigest()


class _NoValue(Exception):
    """An object that counts by its class alone."""


class _Reader:
    """Reads values, and collects the classes and functions among them, whose files count, too."""

    def __init__(self) -> None:
        self.classes: set[type] = set()
        self.functions: set[FunctionType] = set()
        self._inside: list[int] = []  # ids of the objects that are being read, to stop at cycles

    def read(self, value: Any, *, strict: bool = False) -> Any:
        """Return ``value`` in a form for JSON, the same in every process. ``strict``: raise _NoValue if a part of it counts by its class."""
        if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, _PLAIN):
            return [type(value).__qualname__, str(value)]
        if isinstance(value, Tensor | np.ndarray):
            return ["tensor", [*value.shape], str(value.dtype)]
        if isinstance(value, type):
            self.classes.add(value)
            return ["class", value.__module__, value.__qualname__]
        if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
            function = inspect.unwrap(value.__func__ if isinstance(value, MethodType) else value)
            if isinstance(function, FunctionType) and _package(function) not in _VERSIONED:
                self.functions.add(function)
            return ["function", str(function.__module__), function.__qualname__]
        kind = [type(value).__module__, type(value).__qualname__]
        if id(value) not in self._inside:
            self._inside.append(id(value))
            try:
                content = self._content(value, strict)
            finally:
                self._inside.pop()
            if content is not None:
                return [*kind, content]
        if strict:
            raise _NoValue
        return kind

    def _content(self, value: Any, strict: bool) -> Any:
        """Return the content of a container or a record; None for an object that counts by its class."""
        if isinstance(value, Mapping):
            pairs = [[self.read(key, strict=strict), self.read(entry, strict=strict)] for key, entry in value.items()]
            return sorted(pairs, key=json.dumps)
        if isinstance(value, Sequence):
            return [len(value), [self.read(entry, strict=strict) for entry in islice(value, _LONG)]]
        if isinstance(value, set | frozenset):
            return sorted((self.read(entry, strict=strict) for entry in value), key=json.dumps)
        if isinstance(value, partial):
            return [self.read(part, strict=strict) for part in (value.func, value.args, value.keywords)]
        record, before = _record_of(value), (self.classes.copy(), self.functions.copy())
        if record is None:
            return None
        try:
            fields = [[name, self.read(entry, strict=True)] for name, entry in sorted(record.items())]
        except _NoValue:
            self.classes, self.functions = before
            return None
        self.classes.add(type(value))
        return fields


def _record_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of an object, such as a config; None for a module, whose attributes are read elsewhere, and for torch's and Lightning's
    objects."""
    if isinstance(value, nn.Module) or _package(type(value)) in _VERSIONED:
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else None
