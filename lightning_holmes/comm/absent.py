"""Placeholders for values that this rank does not hold, which raise an error when the step computes with them.

The step runs from its beginning for each stage, so it also runs operations that only other stages need: an embedding,
say, on a placeholder whose result is never used. That is correct as long as such a result affects nothing that counts.
A :class:`Placeholder` passes its :class:`Source` on from operation to operation; where its value counts (inside a layer
that runs here, after the last layer, or where it becomes a Python value), or would be kept, the step is stopped with an
error that names the source. The rules are those by which trace.py records which values are read, so that only a step
that reads more than the traced one is stopped. Operations without placeholders cost nothing extra.

    absence = Absence()
    blank = Source(absence=absence, what="output 0 of layer 2", cure="num_chunks=1", blank=placeholder(like)).stand_in()
    twice = 2 * blank                       # a placeholder, too
    absence.counts = True
    2 * twice                               # AbsentValueError: output 0 of layer 2 is read ...

Parameters stay the same objects: their class is changed to one that intercepts each operation, as torch's uninitialized
parameters do. Outside of a step, and in other threads, every read of an absent parameter's value raises.
"""

import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_holmes.errors import AbsentValueError
from lightning_holmes.torch_private import (
    computes,
    is_in_backward,
    operator_name,
    tensor_version,
    without_torch_dispatch,
    without_torch_function,
    without_torch_functions,
    written_arguments,
)

_LIKES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEWS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "empty_strided")
VALUE_FREE = frozenset(f"aten::{name}" for name in (*_LIKES, *_NEWS, "sym_size", "sym_numel", "sym_stride"))
"""Operators whose result depends on the shape and type of a tensor, not on its values."""
TO_PYTHON = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
"""Operators that return a value to Python."""
SHAPED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Tags of operators whose result has a shape that depends on values."""

READS_NO_VALUE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "ndim", "layout", "grad_fn", "is_sparse")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_meta", "is_cpu", "itemsize", "nbytes")),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(getattr(torch.Tensor, name) for name in ("stride", "is_contiguous", "element_size", "requires_grad_")),
    *(getattr(torch.Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook", "__len__")),
    *(getattr(torch.Tensor, f"new_{name}") for name in ("empty", "full", "ones", "zeros")),
    *(getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randn", "zeros")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""Operations that read or change properties of a parameter, not its value."""

_SOURCE = "_holmes_source"
"""The attribute of a placeholder or parameter that holds its :class:`Source` in a step."""
READ_BY_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Functions that give values to Python without an operator."""
GET_DATA, SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


def placeholder(like: Tensor) -> Tensor:
    """A tensor of ``like``'s shape, dtype and device that holds NaN (zero if the dtype has none) in the memory of one element."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


class Absence:
    """State that the placeholders of a module share.

    Attributes:
        counts: the operations that run now belong to the part of the step that this rank runs.
    """

    def __init__(self) -> None:
        self.counts = False
        self._thread: int | None = None
        self._held: dict[int, nn.Parameter] = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context for a step in this thread: absent parameters are placeholders in it, and only what counts is refused."""
        outer, self._thread = self._thread, threading.get_ident()
        try:
            yield
        finally:
            self._thread = outer

    @property
    def is_in_step(self) -> bool:
        """Whether this thread runs a step; on an accelerator autograd has threads of its own, in which checkpointed layers run again."""
        return self._thread is not None and (self._thread == threading.get_ident() or is_in_backward())

    def hide(self, parameter: nn.Parameter, source: "Source") -> None:
        """From now on treat ``parameter`` as a value that this rank does not hold, until it is given one (:func:`dtensor.replace_local`)."""
        _mark(parameter, source, AbsentParameter)

    def show(self, parameter: nn.Parameter, source: "Source", *, stays_ordinary: bool = False) -> None:
        """From now on treat ``parameter`` as held; its value must not change before :meth:`check`. ``stays_ordinary``:
        its class is not changed, so that changes of its ``data`` are not noticed."""
        source.version, source.before = tensor_version(parameter), None
        self._held[id(parameter)] = parameter
        _mark(parameter, source, None if stays_ordinary else HeldParameter)

    def check(self, parameter: nn.Parameter) -> None:
        """Check that ``parameter`` still has the value with which it was shown.

        Raises:
            AbsentValueError: it was changed, and the change would be lost.
        """
        source: Source | None = vars(parameter).get(_SOURCE)
        if source is None:
            return
        changed = tensor_version(parameter) != source.version
        if source.before is not None and not changed:  # data was read, and torch does not count changes made through it
            changed = not torch.equal(bytes_of(parameter), source.before)
        if changed:
            source.refuse_change()

    def clear(self) -> None:
        """Make the parameters that are held ordinary ones again, at the end of a batch."""
        self.counts = False
        for parameter in self._held.values():
            if not isinstance(parameter, AbsentParameter):
                forget(parameter)
        self._held.clear()


def forget(parameter: Tensor) -> None:
    """Make ``parameter`` an ordinary parameter again, whatever its value."""
    if _SOURCE in vars(parameter):
        parameter.__class__ = _ordinary(type(parameter))
        del vars(parameter)[_SOURCE]


def detached(parameter: Tensor) -> Tensor:
    """``parameter`` without autograd; of an absent one the placeholder in its memory."""
    with without_torch_functions() if isinstance(parameter, AbsentParameter) else nullcontext():
        return parameter.detach()


def _mark(parameter: nn.Parameter, source: "Source", as_class: type[nn.Parameter] | None) -> None:
    ordinary = _ordinary(type(parameter))
    if issubclass(ordinary, nn.Parameter):
        if as_class is not None:
            parameter.__class__ = _derived(as_class, ordinary)
        vars(parameter)[_SOURCE] = source


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """The value that a placeholder stands for.

    Attributes:
        what: its name, for messages; ``cure``: the setting with which this rank would hold it.
        blank: a plain tensor of its shape and dtype, filled with NaN.
        may_change: the placeholder may be written to in place; False for a parameter, and for a value that the traced
            step has not changed.
        version, before: of a parameter: its version when it was shown, and its bytes when its ``data`` was first read.
    """

    absence: Absence
    what: str
    cure: str
    blank: Tensor
    may_change: bool = False
    version: int = 0
    before: Tensor | None = None

    def stand_in(self) -> "Placeholder":
        """A placeholder that shares the memory of ``blank``."""
        return _marked(self.blank, self)

    def refuse_read(self) -> NoReturn:
        """Raise AbsentValueError: the step reads a value that this rank does not hold."""
        raise AbsentValueError(
            f"{self.what} is read where it was not when the step was traced on its first batch, so this rank does not have it there: let the "
            f"first batch read it there, too (times 0, if need be), or use {self.cure}"
        )

    def refuse_apart(self) -> NoReturn:
        """Raise AbsentValueError: the value is read outside of steps and hooks."""
        raise AbsentValueError(
            f"{self.what} is read in a thread of its own, or outside of steps and hooks, where this rank does not have it: read it in a "
            f"hook (on_train_batch_end), which sees the whole module, and hand on a copy; or use {self.cure}"
        )

    def refuse_change(self) -> NoReturn:
        """Raise AbsentValueError: the step changes a value, and the change would be lost."""
        raise AbsentValueError(
            f"the step changes {self.what}, of which a stage has a copy only while it is computed: the change would be lost. "
            f"Change it in a hook between batches (on_train_batch_start), make it a buffer, or use {self.cure}"
        )


class Placeholder(Tensor):
    """A tensor of NaN that carries its :class:`Source`, as do all results that are computed from it."""

    __torch_function__ = without_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs)]
        source = next((vars(t)[_SOURCE] for t in given if isinstance(t, cls) and _SOURCE in vars(t)), None)
        is_free = operator_name(func) in VALUE_FREE
        if source is not None and not is_free:
            _judge(source, func, args, kwargs)
        with without_torch_dispatch():
            output = func(*args, **kwargs)
        return output if is_free or source is None else _carried(output, source, {id(t) for t in given})

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise AbsentValueError in place of functions that give values to Python without an operator."""
        source: Source = vars(self)[_SOURCE]
        source.refuse_read()

    tolist = numpy = __array__ = refuse

    @property
    def data(self) -> Tensor:
        """Another placeholder of the same source, detached from autograd."""
        source: Source = vars(self)[_SOURCE]
        with without_torch_dispatch():
            return _marked(self.detach(), source)

    @data.setter
    def data(self, value: Tensor) -> None:
        source: Source = vars(self)[_SOURCE]
        source.refuse_change()

    def __format__(self, spec: str) -> str:
        return self.refuse() if spec else repr(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        source: Source | None = vars(self).get(_SOURCE)
        return f"Placeholder({'' if source is None else source.what}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor of NaN in the memory of a placeholder; any other tensor itself."""
    if not isinstance(tensor, Placeholder):
        return tensor
    with without_torch_dispatch():
        return tensor.detach().as_subclass(Tensor)


def _marked(tensor: Tensor, source: Source) -> Placeholder:
    found = tensor.as_subclass(Placeholder)
    vars(found)[_SOURCE] = source
    return found


@functools.cache
def depends_on_values(operator: Any) -> bool:
    """Whether an operator returns a Python value, or a tensor whose shape depends on values."""
    return operator_name(operator) in TO_PYTHON or any(tag in operator.tags for tag in SHAPED_BY_VALUES)


def _judge(source: Source, func: Any, args: Any, kwargs: Any) -> None:
    """Raise AbsentValueError if an operation makes a placeholder's value count."""
    if depends_on_values(func):
        source.refuse_read()
    for value in written_arguments(func, args, kwargs):
        for tensor in _tensors(value):
            if isinstance(tensor, Placeholder) and _address(tensor) == _address(source.blank) and not source.may_change:
                source.refuse_change()
    if source.absence.counts and computes(func):
        source.refuse_read()


def _carried(output: Any, source: Source, given: set[int]) -> Any:
    """``output`` with a placeholder in place of each new tensor."""
    if isinstance(output, Tensor):
        return output if id(output) in given else _marked(output, source)
    if isinstance(output, (list, tuple)):
        return type(output)(_carried(each, source, given) for each in output)
    return output


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (list, tuple)):
        if not isinstance(value, Mapping):
            return ()
        value = value.values()
    return [tensor for each in value if type(each) not in _NO_TENSORS for tensor in _tensors(each)]


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, or a copy if it is not contiguous."""
    return GET_DATA(tensor).resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)  # type: ignore[no-any-return]


class AbsentParameter(nn.Parameter):
    """A parameter whose value this rank does not hold: operations of a step see a placeholder, others are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS_NO_VALUE:
            with without_torch_functions():
                return func(*args, **kwargs)
        _refuse_apart(args, kwargs)
        if func == SET_DATA:
            _source_of(args[0]).refuse_change()
        if func in READ_BY_PYTHON:
            _source_of(args[0]).refuse_read()
        if func == GET_DATA:
            return _source_of(args[0]).stand_in()
        return func(*_seen(args), **_seen(kwargs))

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise AbsentValueError in place of copying a value that this rank does not hold."""
        _source_of(self).refuse_read()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._brought().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._brought().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _brought(self) -> nn.Parameter:
        """The parameter itself, after a read of its data, for which a hook of the user brings the value."""
        _ = self.data
        if isinstance(self, AbsentParameter):
            self.refuse()
        return self


def _refuse_apart(args: Any, kwargs: Any) -> None:
    source = next((_source_of(t) for t in _tensors((args, kwargs)) if isinstance(t, AbsentParameter)), None)
    if source is not None and not source.absence.is_in_step:
        source.refuse_apart()


class _RefusesReads(TorchFunctionMode):
    """Refuses what takes an absent parameter and does not ask its class, such as ``torch.tensor(parameter)``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in READS_NO_VALUE:
            _refuse_apart(args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def refusing_in_threads() -> Iterator[None]:
    """Inside, threads of the user's begin with a mode that refuses every read of an absent parameter; none is slower for it in a step."""
    outer = threading.getprofile()

    def begin(*_: Any) -> None:
        sys.setprofile(outer)
        if not threading.current_thread().name.startswith("holmes"):
            _RefusesReads().__enter__()  # type: ignore[no-untyped-call]  # for as long as the thread lives

    threading.setprofile(begin)
    try:
        yield
    finally:
        threading.setprofile(outer)


class HeldParameter(nn.Parameter):
    """A parameter whose value this rank holds for a while, and which must not change: its bytes are copied when
    ``data`` is first read, since torch does not count changes made through it."""

    @property
    def data(self) -> Tensor:
        source: Source | None = vars(self).get(_SOURCE)
        if source is not None and source.before is None:
            source.before = bytes_of(self).clone()
        return GET_DATA(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        source: Source | None = vars(self).get(_SOURCE)
        if source is not None:
            source.refuse_change()
        SET_DATA(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = nn.Parameter(GET_DATA(self).clone(), self.requires_grad)
        copied.__class__ = _ordinary(type(self))
        return copied


_NO_TENSORS = {type(None), bool, int, float, str}
_NEVER_ABSENT = {*_NO_TENSORS, Tensor}
_MARKS = {AbsentParameter, HeldParameter}
for _class in _MARKS:
    _class.__name__ = _class.__qualname__ = "Parameter"  # the name that is printed


@functools.cache
def _ordinary(found: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``found`` has outside of a step; possibly a class of the user's."""
    return next(c for c in found.__mro__ if _MARKS.isdisjoint(c.__mro__))


@functools.cache
def _derived(mark: type[nn.Parameter], ordinary: type[nn.Parameter]) -> type[nn.Parameter]:
    """``mark`` for parameters of the class ``ordinary``, possibly a class of the user's, of which they remain instances."""
    return mark if ordinary is nn.Parameter else type(ordinary.__name__, (mark, ordinary), {"__module__": __name__})


def _source_of(parameter: Tensor) -> Source:
    source: Source = vars(parameter)[_SOURCE]
    return source


def _seen(value: Any) -> Any:
    """``value`` with placeholders in place of absent parameters."""
    if type(value) in _NEVER_ABSENT:
        return value
    if isinstance(value, AbsentParameter):
        with without_torch_functions():
            return _source_of(value).stand_in().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _seen(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(*map(_seen, value)) if hasattr(value, "_fields") else type(value)(map(_seen, value))
    return value
