"""HeldUnit: a unit on an optimizer node: its values, the sum of its gradients, and the optimizer that steps them.

    unit = HeldUnit(3, layout, kind, told, Memory(needs))
    with unit.keeping(1) as flat: ...                        # fill the values: version 1
    with unit.summing(window, reached) as (flat, is_new): ...         # add the gradients of a batch
    unit.update(window, edits, options)                      # version 2
    with unit.values() as flat: ...                          # in the type that workers have

The optimizer steps whole parameters. A parameter for which no worker's microbatch has a gradient gets none, as in plain Lightning.
With a Disk in place of Memory the parameters and states are, for a step, views of buffers that were read, and the optimizer object is
the same: results are equal bit for bit. States of a few elements (Adam's step) stay in memory. One thread changes a unit; another may
read its values at the same time.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.node.description import build_optimizer, may_fuse, options_of
from lightning_holmes.optim.node.disk import ALIGNED, Memory
from lightning_holmes.optim.node.node_options import held_dtype
from lightning_holmes.optim.shard_states import MASTER_WEIGHT
from lightning_holmes.optim.unit import Unit, sum_dtype

_SMALL = 64  # elements

Edit = tuple[str, float]
"""A change that clipping makes to the gradients before the optimizer steps: ("scale", factor) or ("clamp", largest value)."""


class HeldUnit:
    """A unit of an optimizer node; ``version`` counts the versions of its values.

    Args:
        kind, told: the optimizer's class and its description.
        storage: where values, gradients and, on a disk, states are.
    """

    def __init__(self, index: int, layout: Unit, kind: type[Optimizer], told: dict[str, Any], storage: Memory) -> None:
        self.index, self.layout = index, layout
        self.version = self.window = 0
        self.ordered_window = self.updated_window = 0
        """The last windows for which an update was ordered, and made."""
        self._storage = storage
        self._dtype = held_dtype(layout)
        self.stepped = {n for names in told["names"] for n in names if n in layout.names}
        blank = torch.zeros((), dtype=self._dtype)
        self.parameters = {
            n: nn.Parameter(blank.expand(shape), n in self.stepped and blank.is_floating_point())
            for n, shape in zip(layout.names, layout.shapes, strict=True)
        }
        for name, parameter in self.parameters.items():
            vars(parameter).update(told["marks"].get(name, {}))
        self.optimizer = build_optimizer(kind, told, self.parameters)
        self._reached: set[str] = set()
        self._is_summed = False
        # states on a disk: by parameter and key the first byte, shape and type
        self._entries: dict[tuple[str, str], tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0  # in bytes

    # values

    @contextlib.contextmanager
    def _borrow(
        self, *sections: str, fresh: Collection[str] = (), written: Collection[str] = ()
    ) -> Iterator[list[Tensor]]:
        types = {"values": self._dtype, "gradient": sum_dtype(self.layout.dtype)}
        with self._storage.borrow(self.index, *sections, fresh=fresh, written=written) as buffers:
            yield [
                b[: self.layout.numel * types[s].itemsize].view(types[s]) if s in types else b
                for s, b in zip(sections, buffers, strict=True)
            ]

    @contextlib.contextmanager
    def values(self) -> Iterator[Tensor]:
        """Yield the values in the type that workers have, (numel,)."""
        with self._borrow("values") as (flat,):
            yield flat.to(self.layout.dtype)

    @contextlib.contextmanager
    def keeping(self, version: int) -> Iterator[Tensor]:
        """Yield a tensor to fill with the values in the type that workers have, (numel,); they are version ``version``. Masters that round
        to the same values stay."""
        with self._borrow("values", fresh=() if self.version else ("values",), written=("values",)) as (flat,):
            given = torch.empty_like(flat, dtype=self.layout.dtype) if self.layout.has_masters else flat
            yield given
            if given is not flat and self.version:
                given = torch.where(flat.to(given.dtype) == given, flat, given.to(flat.dtype))
            if given is not flat:
                flat.copy_(given)
        self.version = version

    # gradients

    @contextlib.contextmanager
    def summing(self, window: int, reached: Collection[str]) -> Iterator[tuple[Tensor, bool]]:
        """Yield the sum of the gradients of a window, (numel,), to add to, and whether it is new, so that it has to be filled first. The
        first call in a window drops an earlier sum.

        Args:
            reached: the parameters that got a gradient.
        """
        if window != self.window:
            self._forget()
            self.window = window
        is_new = not self._is_summed
        with self._borrow("gradient", fresh=("gradient",) if is_new else (), written=("gradient",)) as (flat,):
            yield flat, is_new
        self._is_summed = True
        self._reached.update(reached)

    def _forget(self) -> None:
        self._storage.forget(self.index, "gradient")
        self._is_summed = False
        self._reached.clear()

    def _edited(self, view: Tensor, edits: Sequence[Edit], *, in_place: bool) -> Tensor:
        gradient = view.to(self._dtype)
        if edits and not in_place and gradient is view:
            gradient = view.clone()
        for kind, value in edits:
            gradient.mul_(value) if kind == "scale" else gradient.clamp_(-value, value)
        return gradient

    @contextlib.contextmanager
    def _gradients(self, window: int, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Yield views of the sums of the window, before edits: of those parameters among ``names`` that have one."""
        if window != self.window or not self._is_summed:
            yield {}
            return
        with self._borrow("gradient") as (flat,):
            wanted = self._reached & set(names)
            yield {n: v for n, v in self.layout.views(flat).items() if n in wanted}

    def norm_squared(self, window: int, names: Collection[str], edits: Sequence[Edit]) -> float:
        """Return the squared norm of the gradients of ``names``, after ``edits``."""
        with self._gradients(window, names) as views:
            own = ((v, edits if n in self.stepped else ()) for n, v in views.items())
            norms = (torch.linalg.vector_norm(self._edited(*of, in_place=False)) for of in own)
            return sum(float(norm) ** 2 for norm in norms)

    def is_finite(self, window: int) -> bool:
        """Whether all gradients that the optimizer steps with are finite."""
        with self._gradients(window, self.stepped) as views:
            return all(bool(view.isfinite().all()) for view in views.values())

    # the optimizer

    def prefetch(self) -> None:
        """Start to read what an update needs, if there is room."""
        if self.optimizer is not None:
            self._storage.prefetch(self.index, "values", "states")

    def update(self, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        """Step with the gradients of the window.

        Raises:
            UnsupportedModuleError: the optimizer changes the options of its groups in a step, which the workers set.
        """
        if self.optimizer is not None:
            has_sum = window == self.window and self._is_summed
            with self._shown(*["gradient"] * has_sum) as sums:
                for name, view in self.layout.views(sums[0]).items() if has_sum else ():
                    if name in self._reached & self.stepped:
                        self.parameters[name].grad = self._edited(view, edits, in_place=True)
                self._step(self.optimizer, options)
                for parameter in self.parameters.values():
                    parameter.grad = None
        self._forget()
        self.updated_window = window
        self.version += 1

    def _step(self, optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
        for group, given in zip(optimizer.param_groups, options, strict=True):
            group.update(given)
            if may_fuse(type(optimizer), given, self._dtype):
                group["fused"] = True
        before = options_of(optimizer)
        optimizer.step()
        for number, (old, new) in enumerate(zip(before, options_of(optimizer), strict=True)):
            # not ``!=``: NaN differs from itself
            changed = next((key for key in new if repr(new[key]) != repr(old.get(key))), None)
            if changed is not None:
                raise UnsupportedModuleError(
                    f"{type(optimizer).__name__} changes {changed!r} of its parameter group {number} in each step, and an "
                    f"optimizer node gets options from the workers, where schedulers set them; use an optimizer that keeps count "
                    f"in its state, or optimizer_nodes=0"
                )

    @contextlib.contextmanager
    def _shown(self, *extra: str, changes: bool = True) -> Iterator[list[Tensor]]:
        """Give parameters and states their values inside, and keep what they are afterwards if it ``changes`` them; yields the ``extra``
        sections."""
        assert self.optimizer is not None
        sections = ["values", *["states"] * self._storage.on_disk]
        fresh, written = () if self._entries else ("states",), sections if changes else ()
        with self._borrow(*sections, *extra, fresh=fresh, written=written) as buffers:
            for name, view in self.layout.views(buffers[0]).items():
                self.parameters[name].data = view
            for (name, key), entry in self._entries.items():
                self.optimizer.state[self.parameters[name]][key].data = _view(buffers[1], *entry)
            yield buffers[len(sections) :]
            if self._storage.on_disk:
                self._put_away(self.optimizer, buffers[1])

    def _put_away(self, optimizer: Optimizer, buffer: Tensor) -> None:
        """Take the memory of parameters and large states, after states that are not in ``buffer`` yet have been copied there."""
        for name, parameter in self.parameters.items():
            _empty(parameter)
            states = optimizer.state.get(parameter, {}).items()
            large = {k: v for k, v in states if isinstance(v, Tensor) and v.numel() > _SMALL}
            for gone in [entry for entry in self._entries if entry[0] == name and entry[1] not in large]:
                del self._entries[gone]
            for key, value in large.items():
                entry = self._entries.get((name, key))
                if entry is None or entry[1:] != (value.shape, value.dtype):
                    entry = self._entries[name, key] = self._end, value.shape, value.dtype
                    self._end += -(-value.nbytes // ALIGNED) * ALIGNED
                    if self._end > buffer.numel():
                        raise UnsupportedModuleError(
                            f"{type(optimizer).__name__} keeps more for {self.layout.names[0]} and its like than a test of it showed, or "
                            f'states whose shape changes: {self._end} bytes for {buffer.numel()}; use optimizer_states="memory"'
                        )
                view = _view(buffer, *entry)
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
                _empty(value)

    # checkpoints

    @contextlib.contextmanager
    def states(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the optimizer states by parameter, with the fp32 masters of parameters in low precision."""
        if self.optimizer is None:
            yield {}
            return
        with self._shown(changes=False):
            state = self.optimizer.state
            found = {n: dict(state[p]) for n, p in self.parameters.items() if p in state}
            for name in self.stepped if self.layout.has_masters else ():
                found.setdefault(name, {})[MASTER_WEIGHT] = self.parameters[name].detach()
            yield found

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load optimizer states, as ``Optimizer.load_state_dict`` does: in the parameters' types. Masters are loaded if they round to the
        present values; other weights may have been loaded."""
        if self.optimizer is None:
            return
        self._entries.clear()
        self._end = 0
        with self._shown():
            for name in states if self.layout.has_masters else ():
                saved = states[name].get(MASTER_WEIGHT)
                if saved is not None:
                    sent, master = self.layout.dtype, self.parameters[name].detach()
                    master.copy_(torch.where(saved.to(sent) == master.to(sent), saved, master))
            names = {id(p): n for n, p in self.parameters.items()}
            params = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
            held = self.optimizer.state_dict()
            given = {n: {k: v for k, v in state.items() if k != MASTER_WEIGHT} for n, state in states.items()}
            held["state"] = {i: given[name] for i, name in enumerate(params) if given.get(name)}
            self.optimizer.load_state_dict(held)


def _empty(tensor: Tensor) -> None:
    tensor.data = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _view(buffer: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
