"""What a module's costs depend on, as a digest that is the same in every process that builds the same module.

    digest_module(module)        # 32 hex digits; None where the source of a class cannot be found

It has the facts that ranks compare (agreement.py), the hyperparameters and attributes of all submodules, and the files that their classes
are written in, with their bases, up to torch's and Lightning's, whose versions say as much. An attribute counts by its value where it
is a number, a text, a type, or holds nothing but such; tensors by shape and type, functions by their name and file, and any other
object by its class alone. What a module reads elsewhere (globals of other files, the environment) is not known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import json
import numbers
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.strategy.agreement import module_facts

_VERSIONED = ("builtins", "torch", "lightning")  # packages of which the version is told elsewhere
_LONG = 10_000  # elements of a list: of longer ones so many count, and how many there are
_DEEP = 8  # of objects in objects


def digest_module(module: LightningModule) -> str | None:
    """A digest; None where the source of a class cannot be found, as at a prompt."""
    classes: set[type] = set()
    functions: set[FunctionType] = set()
    attributes = {
        name: {key: _described(value, classes, functions) for key, value in sorted(_own_attributes(submodule).items())}
        for name, submodule in module.named_modules()
    }
    classes.update(type(submodule) for submodule in module.modules())
    try:
        sources = sorted({*map(_source, _with_bases(classes)), *map(_source, functions)})
    except (OSError, TypeError):
        return None
    facts = [module_facts(module), attributes, sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes beside those that torch and Lightning give to every module."""
    kinds = [cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule" and "lightning" in _package(cls)]
    common = vars((kinds or [nn.Module])[0]())
    return {name: value for name, value in vars(module).items() if name == "training" or name not in common}


def _with_bases(classes: set[type]) -> Iterator[type]:
    for base in {base for cls in classes for base in cls.__mro__}:
        if _package(base) not in _VERSIONED:
            yield base


def _package(made: type | FunctionType) -> str:
    return made.__module__.partition(".")[0]


def _source(made: type | FunctionType) -> tuple[str, str]:
    """A class or function, and a digest of its file."""
    path = inspect.getsourcefile(made) or inspect.getfile(made)
    return made.__qualname__, hashlib.sha256(Path(path).read_bytes()).hexdigest()


class _NoValue(Exception):
    """An object that counts by its class alone."""


def _described(
    value: Any, classes: set[type], functions: set[FunctionType], *, depth: int = 0, strict: bool = False
) -> Any:
    """``value`` as JSON can hold it, the same in every process. ``strict``: raises _NoValue where part of it counts by its class alone."""
    again = partial(_described, classes=classes, functions=functions, depth=depth + 1, strict=strict)
    if value is None or isinstance(value, bool | int | str):
        return [type(value).__qualname__, str(value)] if isinstance(value, enum.Enum) else value
    if isinstance(
        value, numbers.Number | np.dtype | bytes | torch.dtype | torch.device | torch.layout | PurePath | enum.Enum
    ):
        return [type(value).__qualname__, str(value)]
    if isinstance(value, Tensor | np.ndarray):
        return ["tensor", [*value.shape], str(value.dtype)]
    if isinstance(value, type):
        classes.add(value)
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        function = inspect.unwrap(value.__func__ if isinstance(value, MethodType) else value)
        if isinstance(function, FunctionType) and _package(function) not in _VERSIONED:
            functions.add(function)
        return ["function", str(function.__module__), function.__qualname__]
    kind = [type(value).__module__, type(value).__qualname__]
    if depth < _DEEP:
        if isinstance(value, Mapping):
            pairs = [[again(key), again(entry)] for key, entry in list(value.items())[:_LONG]]
            return [*kind, len(value), sorted(pairs, key=json.dumps)]
        if isinstance(value, list | tuple | range):
            return [*kind, len(value), [again(entry) for entry in value[:_LONG]]]
        if isinstance(value, set | frozenset):
            return [*kind, len(value), sorted((again(entry) for entry in value), key=json.dumps)[:_LONG]]
        if isinstance(value, partial):
            return [*kind, again(value.func), again(value.args), again(value.keywords)]
        record = _record_of(value)
        if record is not None:
            with contextlib.suppress(_NoValue):
                fields = [[name, again(entry, strict=True)] for name, entry in sorted(record.items())]
                classes.add(type(value))
                return [*kind, fields]
    if strict:
        raise _NoValue
    return kind


def _record_of(value: Any) -> dict[str, Any] | None:
    """The fields of an object, such as a config; None of a module, whose own are looked at elsewhere, and of torch's own."""
    if isinstance(value, nn.Module) or _package(type(value)) in _VERSIONED:
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else None
