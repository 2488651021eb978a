"""Wire: serializes values to bytes for another rank, which runs no code from them.

Numbers, strings, containers, tensors and arrays are sent as plain data. An object is sent as the name of its class and
its attributes: the receiver makes it, without its constructor, from a class that it has already imported. So a process
that reaches a port of a job can give a rank wrong values, but no code, as a pickle could.

    decode(encode({"loss": torch.ones(2), "names": ("a", "b")}))

An object that occurs twice is one object at the receiver, too. Values that cannot be sent are refused by name: classes
written in C that keep state of their own, classes with ``__del__``, functions other than a module's, most classes of
the standard library.

The format: eight bytes with the length of a JSON text, that text, and the bytes of tensors, arrays and byte strings one
after another.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import enum
import json
import math
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_holmes.errors import HolmesError, RemoteError, UnsupportedModuleError
from lightning_holmes.torch_private import sparse_parts

_HEAD = 8
_REDUCTIONS = ("abs", "all", "any", "len", "max", "min", "round", "sum")
_OF_LIBRARY = ("argparse", "collections", "types")  # modules of the standard library whose classes only hold values
_BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_MADE = (complex, range, slice, datetime.date, datetime.time, datetime.datetime, datetime.timedelta, *_PATHS)
_OWN_GPU = "the rank's GPU"
_COMPRESSED = {torch.sparse_csr: True, torch.sparse_bsr: True, torch.sparse_csc: False, torch.sparse_bsc: False}


def encode(value: Any) -> bytes:
    """Serialize ``value``.

    Raises:
        UnsupportedModuleError: it holds something that cannot be sent, which is named.
    """
    writer = _Writer()
    try:
        text = json.dumps(writer.node(value), separators=(",", ":")).encode()
    except RecursionError:
        raise _refusal(type(value), "it is nested too deeply") from None
    return b"".join((len(text).to_bytes(_HEAD, "little"), text, *writer.buffers))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        RemoteError: the bytes are malformed, or name a class or function that this rank has not imported, or does not have.
        UnsupportedModuleError: they name a class whose objects cannot be sent.
    """
    data = memoryview(data)
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    try:
        return _Reader(data[end:]).value(json.loads(bytes(data[_HEAD:end])))
    except HolmesError:
        raise
    except Exception as error:
        raise RemoteError(f"what another rank has sent cannot be read: {type(error).__name__}: {error}") from error


def _refusal(cls: type, why: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"a value of the class {cls.__module__}.{cls.__qualname__} cannot be sent to other ranks: {why}. Nothing is unpickled that "
        f"comes over the network; use numbers, texts, tensors, lists, dicts, or a dataclass of these"
    )


def _find(module: str, name: str) -> Any:
    """The object of a dotted name in a module that has been imported; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr might import something
    return found


def find_problem(cls: type) -> str:
    """Why objects of a class cannot be made from their attributes; "" if they can."""
    if hasattr(cls, "__del__"):
        return "it has __del__"
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names and cls.__module__ not in (*_OF_LIBRARY, "__main__"):
        return "only some classes of the standard library are sent"
    if issubclass(cls, (*_BASES, collections.deque, types.SimpleNamespace)):
        return ""
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return "it has its own way of being pickled"
    try:
        object.__new__(cls)
    except TypeError:
        return "its state is not in its attributes"
    return ""


def _class(module: str, name: str) -> type:
    found = _find(module, name)
    if not isinstance(found, type):
        raise RemoteError(
            f"another rank has sent an object of {module}.{name}, which this one has not imported, or does not have: import {module} on every "
            f"rank, in the same version"
        )
    return found


def _of_torch(kind: type, name: str) -> Any:
    found = vars(torch).get(name)
    if not isinstance(found, kind):
        raise TypeError(f"torch.{name} is no {kind.__name__}")
    return found


def _name_of_device(device: torch.device) -> str:
    """The name of a device for another rank. A rank computes on one GPU: that of the sender is that of the receiver, whatever their indices,
    so that no rank touches the GPU of another."""
    is_own = device.type == "cuda" and device.index is not None and device.index == torch.cuda.current_device()
    return _OWN_GPU if is_own else str(device)


def _device(name: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if name == _OWN_GPU else torch.device(name)


def _state(value: Any) -> Any:
    """The attributes of an object, or the state that its ``__getstate__`` returns."""
    cls = type(value)
    tells = getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
    if tells and hasattr(cls, "__setstate__"):
        return ["its own", value.__getstate__()]
    if tells or hasattr(cls, "__setstate__"):
        raise _refusal(cls, "it has one of __getstate__ and __setstate__")
    return attributes_of(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots, too."""
    found = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _restore(value: Any, state: Any) -> None:
    if isinstance(state, list):
        value.__setstate__(state[1])
        return
    for name, attribute in state.items():
        object.__setattr__(value, name, attribute)


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._kept: list[Any] = []  # keeps values alive, so that their ids stay unique

    def node(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self._numbers:
            number = self._numbers[id(value)]
            if number in self._open:
                raise _refusal(type(value), "it contains itself")
            return ["again", number]
        number = self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        kind, content = self._content(value, number)
        return [kind, number, *content]

    def _content(self, value: Any, number: int) -> tuple[str, list[Any]]:
        cls = type(value)
        if cls is list:
            return "list", [self.node(v) for v in value]
        if cls is dict:
            return "dict", [self.node(part) for item in value.items() for part in item]
        if cls in (tuple, set, frozenset, torch.Size):
            self._open.add(number)
            found = [self.node(v) for v in value]
            self._open.discard(number)
            return ("size" if cls is torch.Size else cls.__name__), found
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value)
        if cls in (bytes, bytearray):
            self.buffers.append(bytes(value))
            return cls.__name__, [len(value)]
        if isinstance(value, torch.device):
            return "device", [_name_of_device(value)]
        if isinstance(value, (torch.dtype, torch.layout)):
            return type(value).__name__, [str(value).removeprefix("torch.")]
        if isinstance(value, type):
            return "class", self._name(value)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return "function", self._function(value)
        if isinstance(value, enum.Enum):
            return "enum", [*self._name(cls), value.name]
        if isinstance(value, BaseException):
            attributes = {k: v for k, v in vars(value).items() if k != "__notes__"}
            named = isinstance(value, OSError) and len(value.args) == 2 and value.filename is not None
            arguments = (*value.args, value.filename) if named else value.args  # type: ignore[attr-defined]
            return "exception", [*self._name(cls), self.node(arguments), self.node(attributes)]
        if cls in _MADE:
            return "made", self._made(value)
        return "object", self._object(value, cls)

    def _tensor(self, value: Tensor) -> tuple[str, list[Any]]:
        cls = type(value)
        if cls not in (Tensor, nn.Parameter):
            if "__torch_dispatch__" in {
                name for base in cls.__mro__[: cls.__mro__.index(Tensor)] for name in vars(base)
            }:
                raise _refusal(cls, "it is no ordinary tensor")
            plain = value.detach().as_subclass(Tensor)
            return "subclass", [*self._name(cls), self.node(plain), self.node(dict(vars(value)))]
        if value.is_quantized or value.is_nested:
            raise _refusal(cls, "it is quantized or nested")
        data = value.detach()
        if value.layout is torch.sparse_coo:
            parts = [*sparse_parts(data), list(data.shape), data.is_coalesced()]
            return "coo", [self.node(part) for part in parts]
        if value.layout is not torch.strided:
            rows = _COMPRESSED[value.layout]
            ends = (data.crow_indices(), data.col_indices()) if rows else (data.ccol_indices(), data.row_indices())
            return "compressed", [self.node(part) for part in (*ends, data.values(), list(data.shape), data.layout)]
        data = data.resolve_conj().resolve_neg().cpu().contiguous()
        self.buffers.append(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        dtype, device = str(data.dtype).removeprefix("torch."), _name_of_device(value.device)
        return "tensor", [dtype, list(data.shape), device, value.requires_grad, cls is nn.Parameter]

    def _array(self, value: Any) -> tuple[str, list[Any]]:
        if type(value) is not np.ndarray and isinstance(value, np.ndarray):
            raise _refusal(type(value), "it is no ordinary array")
        if value.dtype.hasobject or value.dtype.names is not None:
            raise _refusal(type(value), f"it is an array of {value.dtype}")
        self.buffers.append(np.ascontiguousarray(value).tobytes())
        return "array", [value.dtype.str, list(value.shape), isinstance(value, np.generic)]

    def _function(self, value: Any) -> list[Any]:
        name = value.__name__
        for module in (builtins, torch):
            if getattr(module, name, None) is value and (module is torch or name in _REDUCTIONS):
                return [module.__name__, name]
        module_name = value.__module__ or ""
        if module_name.partition(".")[0] in sys.stdlib_module_names and module_name != "__main__":
            raise _refusal(type(value), f"{module_name}.{name} is of the standard library")
        if _find(module_name, value.__qualname__) is not value:
            raise _refusal(type(value), f"{value.__qualname__} is no function of a module")
        return [module_name, value.__qualname__]

    def _made(self, value: Any) -> list[Any]:
        cls = type(value)
        arguments: list[Any]
        if isinstance(value, complex):
            arguments = [value.real, value.imag]
        elif isinstance(value, (range, slice)):
            arguments = [value.start, value.stop, value.step]
        elif isinstance(value, datetime.timedelta):
            arguments = [value.days, value.seconds, value.microseconds]
        elif isinstance(value, pathlib.PurePath):
            arguments = [str(value)]
        else:
            arguments = [value.isoformat()]
        return [[kind.__name__ for kind in _MADE].index(cls.__name__), *(self.node(a) for a in arguments)]

    def _object(self, value: Any, cls: type) -> list[Any]:
        problem = find_problem(cls)
        if problem:
            raise _refusal(cls, problem)
        base = next((base for base in _BASES if isinstance(value, base)), None)
        state = _state(value)
        content: Any = None
        if isinstance(value, collections.deque):
            content = [list(value), value.maxlen]
        elif base is dict:
            content = [part for item in dict.items(value) for part in item]
            if isinstance(value, collections.defaultdict):
                content = [value.default_factory, *content]
        elif base in (list, tuple, set, frozenset):
            content = list(base.__iter__(value))
        elif base is not None:
            content = base(value)
        return [*self._name(cls), self.node(content), self.node(state)]

    def _name(self, cls: type) -> list[str]:
        if _find(cls.__module__, cls.__qualname__) is not cls:
            raise _refusal(cls, "it is no class of a module")
        return [cls.__module__, cls.__qualname__]


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._known: dict[int, Any] = {}

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, number, *content = node
        if kind == "again":
            return self._known[number]
        if kind == "list":
            made: Any = self._keep(number, [])
            made.extend(self.value(part) for part in content)
            return made
        if kind == "dict":
            made = self._keep(number, {})
            parts = [self.value(part) for part in content]
            made.update(zip(parts[::2], parts[1::2], strict=True))
            return made
        if kind == "object":
            return self._object(number, *content)
        return self._keep(number, _READERS[kind](self, *content))

    def _keep(self, number: int, value: Any) -> Any:
        self._known[number] = value
        return value

    def _take(self, length: int) -> memoryview:
        found = self._data[self._at : self._at + length]
        if length < 0 or len(found) != length:
            raise ValueError("it is cut off")
        self._at += length
        return found

    def _values(self, *content: Any) -> list[Any]:
        return [self.value(part) for part in content]

    def _tensor(self, dtype: str, shape: list[int], device: str, requires_grad: bool, is_parameter: bool) -> Tensor:
        kind = _of_torch(torch.dtype, dtype)
        data = self._take(math.prod(shape) * kind.itemsize)
        found = torch.empty(shape, dtype=kind)
        if data:
            found.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        found = found.to(_device(device))
        return nn.Parameter(found, requires_grad) if is_parameter else found.requires_grad_(requires_grad)

    def _array(self, dtype: str, shape: list[int], is_scalar: bool) -> Any:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"an array of {dtype}")
        found = np.frombuffer(bytearray(self._take(math.prod(shape) * kind.itemsize)), dtype=kind).reshape(shape)
        return found[()] if is_scalar else found

    def _coo(self, *content: Any) -> Tensor:
        indices, values, shape, is_coalesced = self._values(*content)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)

    def _compressed(self, *content: Any) -> Tensor:
        outer, inner, values, shape, layout = self._values(*content)
        return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=True)

    def _subclass(self, module: str, name: str, plain: Any, state: Any) -> Tensor:
        cls = _class(module, name)
        if not issubclass(cls, Tensor):
            raise TypeError(f"{name} is no tensor")
        found: Tensor = self.value(plain).as_subclass(cls)
        vars(found).update(self.value(state))
        return found

    def _function(self, module: str, name: str) -> Callable[..., Any]:
        found = _find(module, name)
        allowed = (
            name in _REDUCTIONS if module == "builtins" else module.partition(".")[0] not in sys.stdlib_module_names
        )
        if not (allowed or module == "__main__") or not isinstance(
            found, (types.FunctionType, types.BuiltinFunctionType)
        ):
            raise ValueError(f"the function {module}.{name}")
        return found

    def _exception(self, module: str, name: str, arguments: Any, state: Any) -> BaseException:
        cls = _class(module, name)
        if not issubclass(cls, BaseException):
            raise TypeError(f"{name} is no exception")
        given = self.value(arguments)
        made = (OSError if issubclass(cls, OSError) else BaseException).__new__(cls, *given)
        if not issubclass(cls, OSError):
            made.args = given
        vars(made).update(self.value(state))
        return made

    def _made(self, place: int, *arguments: Any) -> Any:
        cls: Any = _MADE[place]
        make = cls.fromisoformat if cls in (datetime.date, datetime.time, datetime.datetime) else cls
        return make(*self._values(*arguments))

    def _object(self, number: int, module: str, name: str, content: Any, state: Any) -> Any:
        cls = _class(module, name)
        problem = find_problem(cls)
        if problem:
            raise _refusal(cls, problem)
        base = next((base for base in _BASES if issubclass(cls, base)), None)
        if base in (tuple, frozenset, str, bytes, int, float):
            made = self._keep(number, base.__new__(cls, self.value(content)))
        elif issubclass(cls, collections.deque):
            items, longest = self.value(content)
            made = self._keep(number, cls(items, longest))
        else:
            kinds = (collections.OrderedDict, collections.defaultdict, types.SimpleNamespace, base or object)
            made = self._keep(number, next(kind for kind in kinds if issubclass(cls, kind)).__new__(cls))
            found = self.value(content)
            if issubclass(cls, collections.defaultdict):
                made.default_factory, *found = found
            if base is dict:
                put: Any = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
                for key, value in zip(found[::2], found[1::2], strict=True):
                    put.__setitem__(made, key, value)
            elif base is list:
                list.extend(made, found)
            elif base is set:
                set.update(made, found)
        _restore(made, self.value(state))
        return made


_READERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda reader, *content: tuple(reader._values(*content)),
    "set": lambda reader, *content: set(reader._values(*content)),
    "frozenset": lambda reader, *content: frozenset(reader._values(*content)),
    "size": lambda reader, *content: torch.Size(content),
    "bytes": lambda reader, length: bytes(reader._take(length)),
    "bytearray": lambda reader, length: bytearray(reader._take(length)),
    "dtype": lambda reader, name: _of_torch(torch.dtype, name),
    "layout": lambda reader, name: _of_torch(torch.layout, name),
    "device": lambda reader, name: _device(name),
    "class": lambda reader, module, name: _class(module, name),
    "enum": lambda reader, module, name, member: vars(_class(module, name))["_member_map_"][member],
    "tensor": _Reader._tensor,
    "array": _Reader._array,
    "coo": _Reader._coo,
    "compressed": _Reader._compressed,
    "subclass": _Reader._subclass,
    "function": _Reader._function,
    "exception": _Reader._exception,
    "made": _Reader._made,
}
