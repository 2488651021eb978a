"""StoredUnit: a Unit whose values, states and gradients are in a file, and in memory only while they are needed.

    unit = StoredUnit(3, layout, kind, told, num_workers=2, store=store, needs=needs)
    unit.prepare()                                       # starts to read; waits for memory
    unit.update(window, edits, options)                  # starts to write the results, and does not wait
    with unit.values() as values: ...                    # reads them, if they are not in memory

The optimizer object is the same as that of a Unit in memory: for a step its parameters and states are views of the buffers that were
read, so that results are equal bit for bit. States of a few elements (Adam's step) stay in memory.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes.errors import HolmesError, UnsupportedModuleError
from lightning_holmes.optim.node.buffers import Held, pages
from lightning_holmes.optim.node.description import UnitLayout
from lightning_holmes.optim.node.disk import Transfer, add_from
from lightning_holmes.optim.node.store import ALIGNED, Needs, StateStore
from lightning_holmes.optim.node.unit import Edit, Unit
from lightning_holmes.optim.shard_states import MASTER_WEIGHT

_SMALL = 64  # elements

Entry = tuple[int, torch.Size, torch.dtype]
"""A state in a unit's part of the file: its first byte, its shape and its type."""


class StoredUnit(Unit):
    """Unit ``index`` of ``store``; see Unit for the other arguments.

    Args:
        needs: the bytes of the unit's values, gradient and states.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        kind: type[Optimizer],
        told: dict[str, Any],
        *,
        num_workers: int,
        store: StateStore,
        needs: Needs,
    ) -> None:
        self._index, self._store, self._needs = index, store, needs
        self._values_at, self._gradient_at, self._states_at = (
            store.place(needs[key]) for key in ("values", "gradient", "states")
        )
        self._capacity = pages(needs["states"])
        self._entries: dict[tuple[str, str], Entry] = {}
        self._end = 0  # the end of the last entry, in bytes
        self._small: dict[str, dict[str, Any]] = {}
        """The state entries that stay in memory, by name; every parameter that has a state is a key."""
        self._writes: dict[int, Transfer] = {}  # the last write to each part of the file, by offset
        self._is_spilled = False
        self._ahead: _Prepared | None = None
        super().__init__(layout, kind, told, num_workers=num_workers)

    def _start(self) -> dict[str, Tensor]:
        blank = torch.zeros((), dtype=self.layout.dtype)
        return {name: blank.expand(shape) for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)}

    def begin_again(self, num_workers: int) -> None:
        with self._lock:
            self._leave_ahead()
            super().begin_again(num_workers)

    # values

    def _read_values(self, buffer: Tensor) -> Transfer:
        # needs no wait for writes: values that are being written are borrowed, and so not read
        return self._store.file.read(self._values_at, buffer)

    def _flat(self, buffer: Tensor) -> Tensor:
        return buffer[: self._needs["values"]].view(self.layout.dtype)

    @contextlib.contextmanager
    def values(self) -> Generator[Tensor, None, None]:
        held = self._store.cache.borrow(self._index, self._needs["values"], self._read_values)
        try:
            held.wait()
            yield self._flat(held.buffer).to(self.layout.sent_dtype)
        finally:
            self._store.cache.give_back(self._index)

    def keep(self, values: Tensor, version: int) -> None:
        with self._lock:
            read = self._read_values if self.version else None
            held = self._store.cache.borrow(self._index, self._needs["values"], read)
            held.wait()
            self._follow(self._flat(held.buffer), values)
            self._write(self._values_at, held.buffer, lambda: self._store.cache.give_back(self._index))
            self.wait_for_writes()
        self.version = version

    # the file

    def _write(self, offset: int, buffer: Tensor, then: Callable[[], None]) -> None:
        """Start to write ``buffer``; ``then`` is called when it is written."""
        if offset != self._gradient_at:  # gradients belong to no commit
            self._store.dirty()
        transfer = self._store.file.write(offset, buffer)
        self._writes[offset] = transfer

        def done(error: HolmesError | None) -> None:
            then()
            if error is not None:
                self._store.fail(error)
            self._store.on_room()

        transfer.then(done)

    def wait_for_writes(self) -> None:
        for transfer in list(self._writes.values()):
            transfer.wait()

    # gradients

    def add(self, window: int, touched: Collection[str], gradient: Tensor | None, is_last: bool) -> None:
        if gradient is not None and self._is_spilled and window == self._window:
            self.wait_for_writes()
            add_from(self._store.file, self._gradient_at, gradient, self._store.pieces)
            self._is_spilled = False
        super().add(window, touched, gradient, is_last)
        if gradient is not None and self._sum is not gradient:
            self._store.gradients.give(gradient)

    def forget(self) -> None:
        if self._sum is not None:
            self._store.gradients.give(self._sum)
        self._is_spilled = False
        super().forget()

    def spill(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # the unit is being updated, or its gradients summed
        try:
            if self._sum is None or self._gradients is not None or self._turn or self._ahead is not None:
                return False
            if self._is_complete:
                return False  # its update has been ordered, and frees the memory
            if self._gradient_at in self._writes:  # a write of an earlier window that was not stepped
                self._writes[self._gradient_at].wait()
            buffer = self._store.gradients.whole(self._sum)
            self._sum, self._is_spilled = None, True
            self._write(self._gradient_at, buffer, lambda: self._store.gradients.give(buffer))
            return True
        finally:
            self._lock.release()

    def _raw(self, buffer: Tensor) -> Tensor:
        return buffer[: self._needs["gradient"]].view(self.layout.gradient_dtype)

    def _read_gradient(self, buffer: Tensor) -> Transfer:
        self.wait_for_writes()
        return self._store.file.read(self._gradient_at, buffer[: pages(self._needs["gradient"])])

    @contextlib.contextmanager
    def _gradients_at_hand(self, window: int) -> Generator[None, None, None]:
        """Read the sum of the gradients, if it was written to disk, and hold it inside the ``with`` block."""
        if not self._is_spilled or window != self._window:
            yield
            return
        buffer = self._store.states.take(self._needs["gradient"])
        try:
            self._read_gradient(buffer).wait()
            self._sum, self._num_edited = self._raw(buffer), 0
            yield
        finally:
            self._sum, self._gradients, self._num_edited = None, None, 0
            self._store.states.give(buffer)

    def norm_squared(self, window: int, names: Collection[str], edits: Sequence[Edit]) -> float:
        with self._lock:
            known = [(len(edits), name) for name in self.layout.names if name in self._reached and name in names]
            if self._is_spilled and window == self._window and self._norms.keys() >= set(known):
                return sum(self._norms[key] for key in known)  # it was computed for another worker already
            with self._gradients_at_hand(window):
                return super().norm_squared(window, names, edits)

    def is_finite(self, window: int) -> bool:
        with self._lock, self._gradients_at_hand(window):
            return super().is_finite(window)

    # the optimizer

    def prepare(self, *, ahead: bool = False) -> bool:
        store = self._store
        if self.optimizer is None or self._ahead is not None:
            return True
        size = self._capacity + (pages(self._needs["gradient"]) if store.spills else 0)
        num_bytes = self._needs["values"]
        if ahead:
            slot = store.states.try_to_take(size, leave=store.slot_bytes)
            if slot is None:
                return False
            leave = store.largest["values"]
            held = store.cache.try_to_borrow(self._index, num_bytes, self._read_values, leave=leave)
            if held is None:
                store.states.give(slot)
                return False
        else:
            slot = store.states.take(size)
            held = store.cache.borrow(self._index, num_bytes, self._read_values)
        with self._lock:  # a checkpoint's states may be loaded meanwhile, before a step: read all or none
            self.wait_for_writes()
            reads = [store.file.read(self._states_at, slot[: self._capacity])] if self._entries else []
            has_gradient = self._is_spilled and not ahead
            if has_gradient:
                reads.append(self._read_gradient(slot[self._capacity :]))
            self._ahead = _Prepared(slot, held, reads, has_gradient)
        return True

    def _leave_ahead(self) -> None:
        """Drop what was read ahead, without an update."""
        if self._ahead is not None:
            self._ahead.wait()
            self._store.states.give(self._ahead.slot)
            self._store.cache.give_back(self._index)
            self._ahead = None

    def update(self, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        """Step with the gradients of the window; see Unit. Call after :meth:`prepare`."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
            if self.optimizer is None:
                super().update(window, edits, options)
                return
            assert ahead is not None
            if self._is_spilled:
                raw = ahead.slot[self._capacity :]
                if not ahead.has_gradient:
                    ahead.reads.append(self._read_gradient(raw))
                self._sum, self._num_edited = self._raw(raw), 0
            ahead.wait()
            self._show(self.layout.views(self._flat(ahead.held.buffer)))
            for name, state in self._views(ahead.slot).items():
                self.optimizer.state[self.parameters[name]] = state
            super().update(window, edits, options)
            self._take_states(self.optimizer, ahead.slot)
            self._show(self._start())
            self._write(self._values_at, ahead.held.buffer, lambda: self._store.cache.give_back(self._index))
            self._write(self._states_at, ahead.slot[: self._capacity], lambda: self._store.states.give(ahead.slot))

    def _show(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].data = value

    def _views(self, slot: Tensor) -> dict[str, dict[str, Any]]:
        """Return the states by name; large tensors are views of ``slot``."""
        found = {name: dict(small) for name, small in self._small.items()}
        for (name, key), entry in self._entries.items():
            found[name][key] = _view(slot, entry)
        return found

    def _take_states(self, optimizer: Optimizer, slot: Tensor) -> None:
        """Move the states out of the optimizer: large tensors that are not views of ``slot`` yet are copied to it."""
        for name, parameter in self.parameters.items():
            state = optimizer.state.pop(parameter, None)
            if state is None:
                continue
            large = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > _SMALL}
            self._small[name] = {key: value for key, value in state.items() if key not in large}
            for gone in [entry for entry in self._entries if entry[0] == name and entry[1] not in large]:
                del self._entries[gone]
            for key, value in large.items():
                entry = self._entries.get((name, key))
                if entry is None or entry[1:] != (value.shape, value.dtype):
                    entry = self._entries[name, key] = self._enter(optimizer, value)
                view = _view(slot, entry)
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)

    def _enter(self, optimizer: Optimizer, value: Tensor) -> Entry:
        start = self._end
        self._end += -(-value.nbytes // ALIGNED) * ALIGNED
        if self._end > self._capacity:
            raise UnsupportedModuleError(
                f"{type(optimizer).__name__} keeps more for {self.layout.names[0]} and its like than a test of it showed, or states "
                f'whose shape changes: {self._end} bytes for {self._needs["states"]}; use optimizer_states="memory"'
            )
        return start, value.shape, value.dtype

    @contextlib.contextmanager
    def states(self, names: Collection[str]) -> Generator[dict[str, dict[str, Any]], None, None]:
        with self._lock:  # wait for an update that has set the version already, but not stored its states yet
            has_none = self._small.keys().isdisjoint(names) and not self.layout.has_masters
        if has_none:
            yield {}
            return
        slot = self._store.states.take(self._capacity)
        try:
            with self._lock:
                self.wait_for_writes()
                if self._entries:
                    self._store.file.read(self._states_at, slot[: self._capacity]).wait()
                found = {name: state for name, state in self._views(slot).items() if name in names}
            if not self.layout.has_masters:
                yield found
                return
            held = self._store.cache.borrow(self._index, self._needs["values"], self._read_values)
            try:
                held.wait()
                yield self._with_masters(found, names, self._flat(held.buffer))
            finally:
                self._store.cache.give_back(self._index)
        finally:
            self._store.states.give(slot)

    def state_keys(self, names: Collection[str]) -> dict[str, dict[str, int]]:
        with self._lock:
            found = {name: dict.fromkeys(small, 0) for name, small in self._small.items() if name in names}
            for (name, key), (_, shape, dtype) in self._entries.items():
                if name in names:
                    found[name][key] = shape.numel() * dtype.itemsize
        for name, whole in zip(self.layout.names, self.layout.shapes, strict=True) if self.layout.has_masters else ():
            if name in names and name in self._stepped:
                found.setdefault(name, {})[MASTER_WEIGHT] = math.prod(whole) * self.layout.dtype.itemsize
        return found

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        if self.optimizer is None:
            return
        with self._lock:
            self._leave_ahead()
            held = self._store.cache.borrow(self._index, self._needs["values"], self._read_values)
            held.wait()
            self._show(self.layout.views(self._flat(held.buffer)))
            super().load(states)
            self._show(self._start())
            self._write(self._values_at, held.buffer, lambda: self._store.cache.give_back(self._index))
            self._small.clear()
            self._entries.clear()
            self._end = 0
            slot = self._store.states.take(self._capacity)
            self._take_states(self.optimizer, slot)
            self.wait_for_writes()
            self._write(self._states_at, slot[: self._capacity], lambda: self._store.states.give(slot))
            self.wait_for_writes()


@dataclass(slots=True)
class _Prepared:
    """What the next step needs, while it is read: a buffer for the states and a gradient that was spilled, the values, and the reads."""

    slot: Tensor
    held: Held
    reads: list[Transfer]
    has_gradient: bool

    def wait(self) -> None:
        """Wait until everything is read; raises the error of a failed read."""
        for transfer in self.reads:
            transfer.wait()
        self.held.wait()


def _view(slot: Tensor, entry: Entry) -> Tensor:
    start, shape, dtype = entry
    return slot[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
