"""Unit: parameters that are sent together, on an optimizer node: their values, the sum of their gradients, and their optimizer.

    unit = Unit(3, layout, kind, told, Memory(needs))
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
from lightning_holmes.optim.node.description import UnitLayout, build_optimizer, may_fuse, options_of
from lightning_holmes.optim.node.disk import ALIGNED, Disk, Memory
from lightning_holmes.optim.shard_states import MASTER_WEIGHT

_SMALL = 64  # elements

Edit = tuple[str, float]
"""A change that clipping makes to the gradients before the optimizer steps: ("scale", factor) or ("clamp", largest value)."""


class Unit:
    """A unit of an optimizer node; ``version`` counts the versions of its values.

    Args:
        kind, told: the optimizer's class and its description, to which groups may be added later.
        storage: where values, gradients and, on a disk, states are.
    """

    def __init__(
        self, index: int, layout: UnitLayout, kind: type[Optimizer], told: dict[str, Any], storage: Memory | Disk
    ) -> None:
        self.index, self.layout, self.told = index, layout, told
        self.version = self.window = 0
        self.ordered_window = self.updated_window = 0
        """The last windows for which an update was ordered, and made."""
        self._kind, self._storage = kind, storage
        self._on_disk = isinstance(storage, Disk)
        self.stepped = {n for names in told["names"] for n in names if n in layout.names}
        blank = torch.zeros((), dtype=layout.dtype)
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        self.parameters = {
            n: nn.Parameter(blank.expand(shapes[n]), n in self.stepped and blank.is_floating_point()) for n in shapes
        }
        for name, parameter in self.parameters.items():
            vars(parameter).update(told["marks"].get(name, {}))
        self.optimizer = build_optimizer(kind, told, self.parameters)
        self._reached: set[str] = set()
        self._is_summed = False
        self._entries: dict[
            tuple[str, str], tuple[int, torch.Size, torch.dtype]
        ] = {}  # on a disk: first byte, shape, type
        self._small: dict[str, dict[str, Any]] = {}  # on a disk: the states that stay in memory
        self._end = 0  # of the entries, in bytes

    # values

    @contextlib.contextmanager
    def _borrow(
        self, *sections: str, fresh: Collection[str] = (), written: Collection[str] = ()
    ) -> Iterator[list[Tensor]]:
        types = {"values": self.layout.dtype, "gradient": self.layout.gradient_dtype, "states": torch.uint8}
        with self._storage.borrow(self.index, *sections, fresh=fresh, written=written) as buffers:
            yield [
                b if s == "states" else b[: self.layout.numel * types[s].itemsize].view(types[s])
                for s, b in zip(sections, buffers, strict=True)
            ]

    @contextlib.contextmanager
    def values(self) -> Iterator[Tensor]:
        """Yield the values in the type that workers have, (numel,)."""
        with self._borrow("values") as (flat,):
            yield flat.to(self.layout.sent_dtype)

    @contextlib.contextmanager
    def keeping(self, version: int) -> Iterator[Tensor]:
        """Yield a tensor to fill with the values in the type that workers have, (numel,); they are version ``version``. Masters that round
        to the same values stay."""
        with self._borrow("values", fresh=() if self.version else ("values",), written=("values",)) as (flat,):
            given = torch.empty(self.layout.numel, dtype=self.layout.sent_dtype) if self.layout.has_masters else flat
            yield given
            if self.layout.has_masters and self.version:
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
        self._begin(window)
        is_new = not self._is_summed
        with self._borrow("gradient", fresh=("gradient",) if is_new else (), written=("gradient",)) as (flat,):
            yield flat, is_new
        self._is_summed = True
        self._reached.update(reached)

    def _begin(self, window: int) -> None:
        if window != self.window:
            self._forget()
            self.window = window

    def _forget(self) -> None:
        self._storage.forget(self.index, "gradient")
        self._is_summed = False
        self._reached.clear()

    def _edited(self, name: str, view: Tensor, edits: Sequence[Edit], *, in_place: bool) -> Tensor:
        gradient = view.to(self.layout.dtype)
        if edits and not in_place and gradient is view:
            gradient = view.clone()
        for kind, value in edits if name in self.stepped else ():
            gradient.mul_(value) if kind == "scale" else gradient.clamp_(-value, value)
        return gradient

    @contextlib.contextmanager
    def _gradients(self, window: int) -> Iterator[dict[str, Tensor]]:
        """Yield views of the sums of the window, of the parameters that have one, before edits."""
        if window != self.window or not self._is_summed:
            yield {}
            return
        with self._borrow("gradient") as (flat,):
            yield {n: v for n, v in self.layout.views(flat).items() if n in self._reached}

    def norm_squared(self, window: int, names: Collection[str], edits: Sequence[Edit]) -> float:
        """Return the squared norm of the gradients of ``names``, after ``edits``."""
        with self._gradients(window) as views:
            wanted = {n: v for n, v in views.items() if n in names}
            norms = (torch.linalg.vector_norm(self._edited(n, v, edits, in_place=False)) for n, v in wanted.items())
            return sum(float(norm) ** 2 for norm in norms)

    def is_finite(self, window: int) -> bool:
        """Whether all gradients that the optimizer steps with are finite."""
        with self._gradients(window) as views:
            return all(bool(v.isfinite().all()) for n, v in views.items() if n in self.stepped)

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
            with self._shown("gradient" if has_sum else "") as sums:
                views = self.layout.views(sums[0]) if sums else {}
                for name in self.stepped:
                    reached = name in views and name in self._reached
                    self.parameters[name].grad = (
                        self._edited(name, views[name], edits, in_place=True) if reached else None
                    )
                self._step(self.optimizer, options)
                for name in self.stepped:
                    self.parameters[name].grad = None
        self._forget()
        self.updated_window = window
        self.version += 1

    def _step(self, optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
        for group, given in zip(optimizer.param_groups, options, strict=True):
            group.update(given)
            if may_fuse(type(optimizer), given, self.layout.dtype):
                group["fused"] = True
        before = options_of(optimizer)
        optimizer.step()
        for number, (old, new) in enumerate(zip(before, options_of(optimizer), strict=True)):
            changed = [
                key for key in new if repr(new[key]) != repr(old.get(key))
            ]  # not ``!=``: NaN differs from itself
            if changed:
                raise UnsupportedModuleError(
                    f"{type(optimizer).__name__} changes {changed[0]!r} of its parameter group {number} in each step, and an "
                    f"optimizer node gets options from the workers, where schedulers set them; use an optimizer that keeps count "
                    f"in its state, or optimizer_nodes=0"
                )

    @contextlib.contextmanager
    def _shown(self, *others: str, fresh: bool = False) -> Iterator[list[Tensor]]:
        """Give parameters and states their values inside, and keep what they are afterwards; yields the ``others`` sections.

        ``fresh``: the states are replaced."""
        extra = [section for section in others if section]
        sections = ["values", "states"] if self._on_disk else ["values"]
        new = {"states"} if fresh or not self._entries else set()
        with self._borrow(*sections, *extra, fresh=new, written=sections) as buffers:
            assert self.optimizer is not None
            for name, view in self.layout.views(buffers[0]).items():
                self.parameters[name].data = view
            if self._on_disk:
                for name, state in self._views(buffers[1]).items() if not fresh else ():
                    self.optimizer.state[self.parameters[name]] = state
            yield buffers[len(sections) :]
            if self._on_disk:
                self._put_states(self.optimizer, buffers[1])
                for parameter in self.parameters.values():
                    parameter.data = torch.zeros((), dtype=self.layout.dtype).expand(parameter.shape)

    def add_groups(
        self, options: Sequence[Mapping[str, Any]], names: Sequence[Collection[str]], marks: Mapping[str, Any]
    ) -> None:
        """Add parameter groups that the workers' optimizer got; ``names`` may include parameters of other units."""
        for name in marks.keys() & self.parameters.keys():
            vars(self.parameters[name]).update(marks[name])
        self.told = self.told | {
            "marks": self.told["marks"] | marks,
            "groups": [*self.told["groups"], *options],
            "names": [*self.told["names"], *names],
        }
        groups = [[self.parameters[n] for n in of_group if n in self.parameters] for of_group in names]
        self.stepped |= {n for of_group in names for n in of_group if n in self.parameters}
        for parameter in (p for parameters in groups for p in parameters):
            parameter.requires_grad_()
        if self.optimizer is None:
            self.optimizer = build_optimizer(self._kind, self.told, self.parameters)
            return
        for given, parameters in zip(options, groups, strict=True):
            Optimizer.add_param_group(self.optimizer, {**given, "params": parameters})

    # states on a disk

    def _views(self, buffer: Tensor) -> dict[str, dict[str, Any]]:
        found = {name: dict(small) for name, small in self._small.items()}
        for (name, key), entry in self._entries.items():
            found[name][key] = _view(buffer, *entry)
        return found

    def _put_states(self, optimizer: Optimizer, buffer: Tensor) -> None:
        """Move the states out of the optimizer into ``buffer``, in which most of them are already."""
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

    # checkpoints

    @contextlib.contextmanager
    def states(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the optimizer states by parameter, with the fp32 masters of parameters in low precision."""
        masters = sorted(self.stepped) if self.layout.has_masters else []
        sections = (["values"] if masters else []) + (["states"] if self._entries else [])
        with self._borrow(*sections) as buffers:
            if self._on_disk:
                found = self._views(buffers[-1] if self._entries else torch.empty(0, dtype=torch.uint8))
            else:
                state = {} if self.optimizer is None else self.optimizer.state
                found = {n: dict(state[p]) for n, p in self.parameters.items() if p in state}
            views = self.layout.views(buffers[0]) if masters else {}
            yield found | {n: found.get(n, {}) | {MASTER_WEIGHT: views[n]} for n in masters}

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load optimizer states, as ``Optimizer.load_state_dict`` does: in the parameters' types. Masters are loaded if they round to the
        present values; other weights may have been loaded."""
        if self.optimizer is None:
            return
        self._entries.clear()
        self._small.clear()
        self._end = 0
        with self._shown(fresh=True):
            for name in states if self.layout.has_masters else ():
                saved = states[name].get(MASTER_WEIGHT)
                if saved is not None:
                    sent, master = self.layout.sent_dtype, self.parameters[name].detach()
                    master.copy_(torch.where(saved.to(sent) == master.to(sent), saved, master))
            names = {id(p): n for n, p in self.parameters.items()}
            params = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
            held = self.optimizer.state_dict()
            given = {n: {k: v for k, v in state.items() if k != MASTER_WEIGHT} for n, state in states.items()}
            held["state"] = {i: given[name] for i, name in enumerate(params) if given.get(name)}
            self.optimizer.load_state_dict(held)


def _view(buffer: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
