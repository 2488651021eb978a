"""Frozen dataclasses as JSON and back, with every value checked. What comes from another process is never trusted.

Fields may be str, int, float, bool, Literal, another such dataclass, tuple[X, ...], tuple[X, Y], or one of these
or None. Fields that stand at their default are left out. There is no way from here to code: no pickle, no class
names in the text.

    text = to_json(nic)
    from_json(Nic, text, source="rank 3")      # raises ConfigurationError: "rank 3: nics[0].up: 7 is not ..."
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_holmes.errors import ConfigurationError

T = TypeVar("T")

MAX_TEXT = 64 * 2**20  # characters; an inventory has some thousands, a topology of 1,000 hosts some millions
_MAX_STRING = 4096
_MAX_ITEMS = 200_000
_MAX_SHOWN = 80


def to_data(value: Any) -> Any:
    """The plain lists, dicts and scalars of a dataclass; fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_data(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple):
        return [to_data(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(to_data(value), allow_nan=False, separators=(",", ":"))


def from_json(cls: type[T], text: str | bytes, *, source: str) -> T:
    """Read what :func:`to_json` wrote. source says whose text it is; ConfigurationError names it and the place."""
    return from_data(cls, parse_json(text, source=source), source=source)


def parse_json(text: str | bytes, *, source: str) -> Any:
    """Plain data from JSON of bounded size, without NaN and infinities."""
    if len(text) > MAX_TEXT:
        raise ConfigurationError(f"{source}: {len(text)} characters of JSON; at most {MAX_TEXT} are read")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{source}: not valid JSON: {str(error)[:200]}") from error


def from_data(cls: type[T], data: Any, *, source: str) -> T:
    """A dataclass from plain data, checked field by field."""
    result: T = _read(cls, data, "", source)
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON has")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(kind: Any, value: Any, path: str, source: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _read(inner, value, path, source)
    if origin is tuple:
        return _read_tuple(arguments, value, path, source)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise _error(source, path, value, f"one of {', '.join(map(str, arguments))}")
        return value
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, path, source)
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _error(
            source, path, value, {str: "a text", int: "a whole number", bool: "true or false"}.get(kind, "a number")
        )
    if isinstance(value, str) and (len(value) > _MAX_STRING or "\0" in value):
        raise _error(source, path, value, f"a text of at most {_MAX_STRING} characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(source, path, value, "a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _error(source, path, value, "a whole number of 64 bits")
    return value


def _read_tuple(arguments: tuple[Any, ...], value: Any, path: str, source: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise _error(source, path, value, f"a list of at most {_MAX_ITEMS} entries")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{path}[{index}]", source) for index, item in enumerate(value))
    if len(value) != len(arguments):
        raise _error(source, path, value, f"a list of {len(arguments)} entries")
    return tuple(
        _read(kind, item, f"{path}[{index}]", source)
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _read_dataclass(cls: Any, value: Any, path: str, source: str) -> Any:
    if not isinstance(value, dict):
        raise _error(source, path, value, "a mapping")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise _error(source, path, unknown[0], f"a field of {cls.__name__}: {', '.join(fields)}")
    given = {}
    for name, field in fields.items():
        if name in value:
            given[name] = _read(_hints(cls)[name], value[name], f"{path}.{name}" if path else name, source)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigurationError(
                f"{source}: {path or 'top level'}: the field {name!r} of {cls.__name__} is missing"
            )
    try:
        return cls(**given)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {path or 'top level'}: {error}") from error


def _error(source: str, path: str, value: Any, expected: str) -> ConfigurationError:
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 2**63:
        shown = "a very large number"
    shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
    return ConfigurationError(f"{source}: {path or 'top level'}: {shown} is not {expected}")
