"""Values sent to other ranks arrive unchanged, nothing that is read is executed, and others are refused by name."""

import collections
import dataclasses
import datetime
import enum
import json
import math
import os
import pathlib
import random
import subprocess
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_holmes.comm.p2p import TensorSpec
from lightning_holmes.comm.wire import decode, encode
from lightning_holmes.errors import ConfigurationError, RemoteError, UnsupportedModuleError


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Held:
    values: list[Any]
    name: str = "held"


class Attributes:
    __slots__ = ("__dict__", "__own", "plain")

    def __init__(self, plain: Any, own: Any) -> None:
        self.plain, self.__own, self.free = plain, own, 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and (self.plain, self.__own, self.free) == (
            other.plain,
            other.__own,
            other.free,
        )

    __hash__ = None  # type: ignore[assignment]


class Ordered(collections.OrderedDict[str, Any]):
    """Sets attributes beside its entries, as Hugging Face's outputs do."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        raise AssertionError("nothing is pickled")


class Told(collections.UserDict[str, Any]):
    def __init__(self, data: Any = None, note: str = "") -> None:
        super().__init__(data)
        self.note = note

    def __getstate__(self) -> Any:
        return {"data": self.data, "note": self.note}

    def __setstate__(self, state: Any) -> None:
        self.data, self.note = state["data"], state["note"] + ", told"


class Words(list[str]):
    pass


class Marked(Tensor):
    pass


def double(x: Any) -> Any:
    return 2 * x


VALUES: dict[str, Any] = {
    "numbers": [None, True, 3, -(2**80), 0.1, math.inf, -0.0, 2 + 1j, "ü\ud800", b"\0\xff", bytearray(b"x")],
    "containers": ({"a": (1, [2]), (3, 4): {5, 6}}, frozenset({7}), range(3), slice(1, None, 2), collections.deque([1], 4)),
    "library": (datetime.timedelta(1, 2, 3), datetime.date(2020, 1, 2), pathlib.PurePosixPath("/a"), pathlib.Path("b")),
    "torch's": (torch.bfloat16, torch.device("cpu"), torch.Size((2, 3)), torch.sparse_csr, torch.nn.Linear, torch.mean, max),
    "random": (random.Random(3).getstate(), np.random.RandomState(4).get_state()[0]),
    "classes": [Colour.RED, Pair([1], 2), Held([1, "x"]), Attributes([1], {2: 3}), Words(["a"]), double, Held],
    "mappings": [Ordered(a=1, b=[2]), collections.Counter("aab"), collections.defaultdict(list, {1: [2]})],
    "names": types.SimpleNamespace(a=1),
    "ours": TensorSpec((2, 3), torch.float16, True),
}  # fmt: skip

TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "bf16, not contiguous": torch.arange(6.0).bfloat16().reshape(2, 3).T,
    "complex, conjugated": torch.complex(torch.ones(2), torch.ones(2)).conj(),
    "bool": torch.tensor([True, False]),
    "8 bits": torch.ones(3).to(torch.float8_e4m3fn),
    "trained": torch.ones(2, requires_grad=True),
    "computed": torch.ones(2, requires_grad=True) * 2,
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "compressed": torch.eye(3).to_sparse_csc(),
    "meant by a user": torch.ones(2).as_subclass(Marked),
}


def back(value: Any) -> Any:
    return decode(encode(value))


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_alike(name: str) -> None:
    value = VALUES[name]
    found = back(value)
    assert found == value and type(found) is type(value)
    if isinstance(value, (list, tuple)):
        assert [type(v) for v in found] == [type(v) for v in value]


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_bit_for_bit(name: str) -> None:
    tensor = TENSORS[name]
    found = back({"x": [tensor]})["x"][0]
    assert type(found) is type(tensor) and found.requires_grad == tensor.requires_grad
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    dense = [t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (found, tensor)]
    assert torch.equal(*(t.to(torch.complex64 if t.is_complex() else torch.float32) for t in dense))


def test_arrays_exceptions_and_what_occurs_twice() -> None:
    for array in (np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2], np.array("text"), np.float32(1.5), np.zeros((0, 2))):
        found = back(array)
        assert type(found) is type(array) and found.dtype == array.dtype and np.array_equal(found, array)
        assert not isinstance(found, np.ndarray) or found.flags.writeable
    refused = ConfigurationError("who=1")
    refused.where = ["here"]  # type: ignore[attr-defined]
    for error in (refused, FileNotFoundError(2, "gone", "a.ckpt"), KeyError("k")):
        found = back(error)
        assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)
    told = back(Told({"a": 1}, "note"))
    assert (told.data, told.note) == ({"a": 1}, "note, told")
    shared, itself = torch.ones(2), [1]
    itself.append(itself)  # type: ignore[arg-type]
    found = back([shared, {"x": shared}, itself])
    assert found[0] is found[1]["x"] and found[2][1] is found[2]
    namespace = back(Ordered(a=1))
    assert namespace.a == 1 and list(namespace) == ["a"]


class Deletes:
    def __del__(self) -> None: ...


class Reduces:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a process": (lambda: subprocess.Popen(["true"]), "subprocess.Popen"),
    "a lock": (threading.Lock, "_thread.lock"),
    "a class that is deleted": (Deletes, "it has __del__"),
    "a class with a reduction": (Reduces, "its own way of being pickled"),
    "a function in a function": (lambda: lambda: 1, "no function of a module"),
    "the library's function": (lambda: os.system, "system"),
    "a module": (lambda: os, "module"),
    "a generator": (lambda: torch.Generator(), "Generator"),
    "objects in an array": (lambda: np.array([object()]), "array of object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UnsupportedModuleError, match=words):
        encode([make()])


def sent(node: Any, data: bytes = b"") -> bytes:
    text = json.dumps(node).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "a process": ["object", 0, "subprocess", "Popen", None, {}],
    "a class that is not imported": ["object", 0, "antigravity", "X", None, {}],
    "a class that imports others": ["class", 0, "transformers", "LlamaModel"],
    "a command": ["function", 0, "os", "system"],
    "a builtin": ["function", 0, "builtins", "exec"],
    "a loader as a type": ["dtype", 0, "load"],
    "too much memory": ["tensor", 0, "float32", [1 << 40], "cpu", False, False],
    "a negative size": ["tensor", 0, "float32", [-4], "cpu", False, False],
    "an array of objects": ["array", 0, "|O", [1], False],
    "an exception that is none": ["exception", 0, "subprocess", "Popen", ["tuple", 1, "true"], ["dict", 2]],
    "nothing known": ["eval", 0, "1"],
    "nothing before": ["again", 7],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_of_a_stranger_are_refused(name: str) -> None:
    with pytest.raises((RemoteError, UnsupportedModuleError)):
        decode(sent(HOSTILE[name]))


def test_a_tuple_that_holds_itself_is_refused() -> None:
    inside: list[Any] = []
    inside.append((inside,))
    with pytest.raises(UnsupportedModuleError, match="it contains itself"):
        encode(inside[0])


def test_bytes_that_are_no_message_are_refused() -> None:
    whole = encode([torch.ones(100), "x"])
    for data in (b"", whole[:-1], whole[:4], b"\x80\x04cos\nsystem\n.", sent("x")[:-1]):
        with pytest.raises(RemoteError):
            decode(data)


def test_the_gpu_of_the_sender_is_that_of_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host compute on one GPU each; none may touch another's. A device without an index stays what it was."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    sent = encode([torch.device("cuda", 3), torch.device("cuda"), torch.device("cuda", 2), torch.device("cpu")])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert decode(sent) == [torch.device("cuda", 1), torch.device("cuda"), torch.device("cuda", 2), torch.device("cpu")]
