"""Sources: which values of a traced step come from where, followed from operator to operator.

Two modes carry sources from inputs to outputs: one sees every operator, the other the accesses from Python that use none.
trace.py makes a module's structure from what they find.

    sources = Sources(num_layers)
    with FollowValues(sources, "Net.training_step", refuse, None), FollowPython(sources, "Net.training_step", refuse):
        step(batch, 0)
    sources.read_at[0]          # the bits of what layer 0 reads
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import READ_BY_PYTHON, SET_DATA, TO_PYTHON, VALUE_FREE, depends_on_values
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.own_generators import describe_draw
from lightning_holmes.pipeline.structure import BEFORE
from lightning_holmes.pipeline.whole_steps import describe_call
from lightning_holmes.torch_private import TorchDispatchMode, collective_ranks, operator_name, written_arguments

_READ_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]


class Sources:
    """The sources of each tensor's values in one traced step, and the positions (see structure.py) at which they are read and changed.

    A set of sources is an int with one bit for each. ``read_at``: by position, what is read there. ``written_at``: by memory,
    the last position that changes it; ``written_early``: the memory that is changed outside of the layers and before their end.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.position = BEFORE
        self.inside = False
        """Whether the step is in a layer: that at ``position``."""
        self.paused = False
        self.kinds: list[tuple[str, int, int]] = []  # of each source: kind, position, index or -1
        self.layer_bits: dict[int, int] = {}
        self.read_at: dict[int, int] = {}
        self.written_at: dict[int, int] = {}
        self.written_early: set[int] = set()
        self._taint: dict[int, int] = {}
        self._pinned: list[Tensor] = []  # keeps memory alive, so that its address stays unique

    def begin_pass(self) -> None:
        """A step begins: what layers compute has new sources."""
        self.position, self.inside = BEFORE, False
        self.layer_bits = {index: self.new("inside", index) for index in range(self.num_layers)}

    def new(self, kind: str, position: int, index: int = -1) -> int:
        """The bit of a new source."""
        self.kinds.append((kind, position, index))
        return 1 << (len(self.kinds) - 1)

    @staticmethod
    def key(tensor: Tensor) -> int:
        """An identifier of a tensor's memory, valid once :meth:`mark` has been called for it; 0 if it has none."""
        try:
            return dtensor.memory_of(tensor).untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):
            return 0

    def of(self, tensors: Iterable[Tensor]) -> int:
        """All sources of some tensors."""
        taint = 0
        for tensor in tensors:
            taint |= self._taint.get(self.key(tensor), 0)
        return taint

    def mark(self, tensor: Tensor, taint: int, *, replace: bool = False) -> None:
        """Add sources to a tensor, or ``replace`` those that it has."""
        key = self.key(tensor)
        if key == 0:
            return
        self._pinned.append(tensor.detach() if not tensor.is_inference() else tensor)
        self._taint[key] = taint if replace else self._taint.get(key, 0) | taint

    def read(self, taint: int, position: int | None = None) -> None:
        """Note that the sources in ``taint`` are read at ``position`` (default: the current one)."""
        where = self.here if position is None else position
        self.read_at[where] = self.read_at.get(where, 0) | taint

    def read_by_python(self, taint: int) -> None:
        """Note that Python has read a value: inside a layer only that layer depends on it, elsewhere every later position may."""
        if self.inside:
            self.read(taint)
        else:
            for position in range(max(self.position, 0), self.num_layers + 1):
                self.read(taint, position)

    def write(self, tensor: Tensor, taint: int) -> None:
        """Note that the current position has changed a tensor in place."""
        key = self.key(tensor)
        self.mark(tensor, taint)
        self.written_at[key] = self.here
        if not self.inside and self.here < self.num_layers:
            self.written_early.add(key)

    @property
    def here(self) -> int:
        """The position of the code that runs now; between two layers that of the first one, whose stage runs up to
        the next layer."""
        is_after = self.position == self.num_layers - 1 and not self.inside
        return self.num_layers if is_after else self.position


class FollowValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the sources of every operator's inputs to its outputs.

    Args:
        place: the step's name, for messages.
        writes: called with each tensor before it is changed in place; may refuse that.
        tensor_ranks: the ranks of the tensor-parallel group, whose collectives are allowed.
        generators: those of the module's own, from which it may draw.
    """

    def __init__(
        self,
        sources: Sources,
        place: str,
        writes: Callable[[Tensor], None],
        tensor_ranks: list[int] | None,
        generators: Sequence[Any] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._place, self._writes, self._tensor_ranks = sources, place, writes, tensor_ranks
        self._generators = generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = self._sources
        if sources.paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        if func.namespace in ("c10d", "_c10d_functional") and not self._is_of_tensor_group(func, args, kwargs):
            raise UnsupportedModuleError(describe_call(self._place, name))
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is own for own in self._generators):
            raise UnsupportedModuleError(describe_draw(self._place, "a torch.Generator that the module does not hold"))
        inputs = tree.tensors_of((args, kwargs))
        taint = sources.of(inputs)
        keys = {sources.key(t) for t in inputs}
        written = [t for value in written_arguments(func, args, kwargs) for t in tree.tensors_of(value)]
        for tensor in written:
            self._writes(tensor)
        output = func(*args, **kwargs)
        if name in VALUE_FREE:
            taint = 0
        if depends_on_values(func):
            sources.read_by_python(taint)
        if name in TO_PYTHON:
            return output
        results = tree.tensors_of(output) if tree.is_container(output) or isinstance(output, Tensor) else []
        fresh = [t for t in results if sources.key(t) not in keys]
        if written or fresh or not results:
            if sources.inside:
                sources.read(taint)
                taint |= sources.layer_bits[sources.position]
            elif sources.here == sources.num_layers:
                sources.read(taint)
        for tensor in written:
            sources.write(tensor, taint)
        for tensor in fresh:
            sources.mark(tensor, taint)
        return output

    def _is_of_tensor_group(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a collective is among the ranks of this tensor-parallel group only, or only waits for such a one."""
        if self._tensor_ranks is None or operator.namespace == "c10d":
            return False
        return collective_ranks(operator, args, kwargs) in (None, self._tensor_ranks)


class FollowPython(TorchFunctionMode):
    """Sees reads of a tensor's values by Python that use no operator, and refuses autograd calls that a pipeline cannot run.

    Args:
        place, writes: as for :class:`FollowValues`.
    """

    def __init__(self, sources: Sources, place: str, writes: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._sources, self._place, self._writes = sources, place, writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sources = self._sources
        if func in READ_BY_PYTHON and args:
            sources.read_by_python(sources.of(tree.tensors_of(args[0])))
        elif func in (torch.autograd.backward, Tensor.backward):
            raise UnsupportedModuleError(describe_call(self._place, "backward"))
        elif func is torch.autograd.grad and sources.position != BEFORE and not sources.inside:
            raise UnsupportedModuleError(describe_call(self._place, "grad"))
        elif func == _READ_GRAD and isinstance(args[0], nn.Parameter):
            raise UnsupportedModuleError(describe_call(self._place, ".grad"))
        elif func == SET_DATA:
            self._writes(args[0])
            sources.write(args[0], 0)
        return func(*args, **(kwargs or {}))
