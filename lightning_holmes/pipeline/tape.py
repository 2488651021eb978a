"""Deferred building of tensors: record what a constructor does to tensors without memory, and replay it for some of them.

Under a :class:`Tape` and a fake tensor mode, ``nn.Linear(...)`` allocates nothing and draws nothing. The tape keeps
every operator, and :meth:`Tape.realise` runs those that one tensor came from. Random ones are seeded by the name
given to the tensor's memory, so that a weight does not depend on which others are built.

    tape = Tape(seed=1, device=torch.device("cpu"))
    with tape.recording():
        layer = nn.Linear(4096, 4096)           # no memory
    tape.name(layer.weight, "layer.weight")
    weight = tape.realise(layer.weight)         # the values that its reset_parameters gives

The tape follows memory, not tensors: views are made anew from offset and strides. The idea is torchdistX's deferred
init.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.seeds import derive_seed, preserved_random_state, seed_torch
from lightning_holmes.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    argument_names,
    fake_mode_of,
    forget_conversions,
    operator_name,
    sharded_locally,
    without_modes,
    written_arguments,
)

_OVERWRITES = frozenset({"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::random_"})
_COPIES = frozenset({"aten::clone", "aten::contiguous", "aten::_to_copy"})
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(slots=True, eq=False)
class _Operation:
    """One recorded operator: its arguments, its results, the memory it made and the memory it wrote."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    made: set[int]
    written: set[int]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor, or the part of it on this rank, has no values: a fake one, or one on the meta device."""
    tensor = dtensor.local_part(tensor)
    return tensor.is_meta or fake_mode_of(tensor) is not None


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators on tensors without memory; operators on real tensors run as usual.

    Args:
        seed: the seed of all random values.
        device: the device for tensors that were built on the meta device.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.device = device
        self.names: dict[int, str] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._history: dict[int, list[int]] = {}  # memory -> the operations that made and wrote it
        self._kept: list[Any] = []  # keeps memory alive, so that its id stays unique

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which new tensors take no memory. A tensor that is sharded over a mesh is sharded by each rank
        on its own, without communication."""
        with sharded_locally(is_fake) if dist.is_initialized() else nullcontext(), self.mode, self:
            yield

    def key(self, tensor: Tensor) -> int:
        """An identifier of a tensor's memory; for a sharded tensor, of its part on this rank."""
        return id(dtensor.local_part(tensor).untyped_storage())

    def name(self, tensor: Tensor, name: str) -> None:
        """Name the tensor's memory, unless it has a name; for a sharded tensor, also the memory of which it is a part."""
        for key in self._keys(tensor):
            self.names.setdefault(key, name)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a recorded operator has given the tensor's memory a value."""
        history = self._history.get(self._keys(tensor)[-1], [])
        return any("empty" not in operator_name(self._operations[index].function) for index in history)

    def _keys(self, tensor: Tensor) -> list[int]:
        """The identifiers of a tensor's memory and, for a sharded tensor, of what it was copied from, up to the whole tensor."""
        keys = [self.key(tensor)]
        while dtensor.is_dtensor(tensor) and keys[-1] in self._history:
            operation = self._operations[self._history[keys[-1]][0]]
            if operator_name(operation.function) not in _COPIES or self.key(operation.args[0]) in keys:
                break
            keys.append(self.key(operation.args[0]))
        return keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tree.tensors_of((args, kwargs))
        if any(map(dtensor.is_dtensor, inputs)):
            return NotImplemented  # its operators on the local parts come here again
        fake = [t for t in inputs if is_fake(t)]
        if inputs and not fake:
            with without_modes():
                return func(*args, **kwargs)
        if any(tag in func.tags for tag in _NEEDS_VALUES):
            with without_modes():
                args, kwargs = tree.map_tensors(self._value, (args, kwargs))
                return func(*args, **kwargs)
        written = [t for value in written_arguments(func, args, kwargs) for t in tree.tensors_of(value)]
        if any(not is_fake(t) for t in written):
            raise UnsupportedModuleError(
                f"{operator_name(func)} writes a tensor that configure_model has built without memory into a real tensor, made before: make both "
                f"in configure_model, or build the module in __init__"
            )
        output = func(*args, **kwargs)
        forget_conversions(self.mode)
        known = {self.key(t) for t in inputs}
        results = tree.tensors_of(output)
        made = {self.key(t) for t in results} - known
        changed = {self.key(t) for t in written}
        if made or changed:
            index = len(self._operations)
            for key in made | changed:
                self._history.setdefault(key, []).append(index)
            self._kept += [t.untyped_storage() for t in (*results, *written)]
            # keep views: the tensors themselves may be given other memory, by .data or Module.to
            args, kwargs, kept = tree.map_tensors(_view_of_fake, (args, kwargs, results))
            self._operations.append(_Operation(func, tuple(args), dict(kwargs), kept, made, changed))
        return output

    # building

    def realise(self, tensor: Tensor) -> Tensor:
        """Build a real tensor with the values that the recorded operators give this one; a real tensor is returned as
        it is. For a sharded tensor, this rank's part."""
        tensor = dtensor.local_part(tensor)
        with without_modes(), torch.no_grad(), preserved_random_state(self.device):
            return self._value(tensor)

    def _value(self, tensor: Tensor) -> Tensor:
        if not is_fake(tensor):
            return tensor
        memory: dict[int, torch.UntypedStorage] = {}
        for index in sorted(self._needed(self.key(tensor))):
            self._repeat(index, memory)
        return self._view(tensor, memory)

    def _needed(self, key: int) -> set[int]:
        """The indices of the operations on which the final value of this memory depends."""
        needed: set[int] = set()
        looked: dict[int, int] = {}
        waiting = [(key, len(self._operations))]
        while waiting:
            key, until = waiting.pop()
            if looked.get(key, -1) >= until:
                continue
            looked[key] = until
            history = [index for index in self._history.get(key, []) if index < until]
            for place in range(len(history) - 1, -1, -1):
                if self._overwrites(self._operations[history[place]], key):
                    history = [history[0], *history[place:]] if place else history  # what made it, and all from here
                    break
            for index in history:
                if index not in needed:
                    needed.add(index)
                    operation = self._operations[index]
                    fake = [t for t in tree.tensors_of((operation.args, operation.kwargs)) if is_fake(t)]
                    waiting += [(self.key(t), index) for t in fake]
        return needed

    def _overwrites(self, operation: _Operation, key: int) -> bool:
        if operator_name(operation.function) not in _OVERWRITES:
            return False
        target = operation.args[0]
        return self.key(target) == key and target.numel() * target.element_size() == target.untyped_storage().nbytes()

    def _repeat(self, index: int, memory: dict[int, torch.UntypedStorage]) -> None:
        operation = self._operations[index]
        args, kwargs = tree.map_tensors(lambda t: self._view(t, memory), (operation.args, operation.kwargs))
        schema = argument_names(operation.function)
        if "device" in schema and operation.results:
            kwargs["device"] = self._place(operation.results[0])
        if "dtype" in schema and operation.results:
            kwargs["dtype"] = operation.results[0].dtype
        if torch.Tag.nondeterministic_seeded in operation.function.tags:
            self._seed(index, operation)
        results = tree.tensors_of(operation.function(*args, **kwargs))
        for then, now in zip(operation.results, results, strict=True):
            key = self.key(then)
            if key not in operation.made or key in memory:
                continue
            if now.stride() != then.stride() or now.storage_offset() != then.storage_offset():
                now = torch.empty_strided(then.shape, then.stride(), dtype=then.dtype, device=now.device).copy_(now)
            memory[key] = now.untyped_storage()

    def _seed(self, index: int, operation: _Operation) -> None:
        """Seed by the name of the memory that is filled and the number of earlier operations on it; if it has no
        name, by the index of the operation."""
        for key in sorted(operation.made | operation.written, key=lambda k: self._history[k][0]):
            if key in self.names:
                digest = hashlib.blake2b(self.names[key].encode(), digest_size=8).digest()
                parts = int.from_bytes(digest, "little"), self._history[key].index(index)
                break
        else:
            parts = 0, index
        seed_torch(derive_seed(self.seed, *parts), self._place(operation.results[0]))

    def _view(self, tensor: Tensor, memory: dict[int, torch.UntypedStorage]) -> Tensor:
        if not is_fake(tensor):
            return tensor
        storage = memory.get(self.key(tensor))
        if storage is None:
            raise UnsupportedModuleError(
                f"{self.names.get(self.key(tensor), 'a tensor')} of shape {tuple(tensor.shape)}, {tensor.dtype}, has no memory, and was not made "
                f"in configure_model, so its value cannot be computed: make it there with torch's operators, or build the module in __init__"
            )
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _place(self, tensor: Tensor) -> torch.device:
        return self.device if tensor.device.type == "meta" else tensor.device


def _view_of_fake(tensor: Tensor) -> Tensor:
    return tensor.detach() if is_fake(tensor) else tensor
