"""Unit: parameters that are sent together, on an optimizer node: their values, the sum of their gradients, and their optimizer.

    unit = Unit(layout, kind, told, num_workers=2)
    unit.keep(values, 1)                                 # version 1
    unit.arrive(1, window, {"up.weight"}, gradient)      # from the workers' threads, in any order; True if the sum is complete
    unit.update(window, edits, options)                  # version 2

Gradients are summed in the order of the workers' ranks, whichever arrives first, so that runs are reproducible bit for bit. The
optimizer steps whole parameters. A parameter for which no worker's microbatch has a gradient gets none, as in plain Lightning.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.errors import ConnectionLostError, UnsupportedModuleError
from lightning_holmes.optim.node.description import UnitLayout, build_optimizer, may_fuse, options_of
from lightning_holmes.optim.shard_states import MASTER_WEIGHT

Edit = tuple[str, float]
"""A change that clipping makes to the gradients before the optimizer steps: ("scale", factor) or ("clamp", largest value)."""


class Unit:
    """A unit of an optimizer node; ``version`` counts the versions of its values.

    Args:
        kind, told: the optimizer's class and its description, to which groups may be added later.
        num_workers: the number of workers whose gradients are summed.
    """

    def __init__(self, layout: UnitLayout, kind: type[Optimizer], told: dict[str, Any], *, num_workers: int) -> None:
        self.layout = layout
        self.version = 0
        self._stepped = {n for names in told["names"] for n in names if n in layout.names}
        self.parameters = {
            n: nn.Parameter(v, n in self._stepped and v.is_floating_point()) for n, v in self._start().items()
        }
        for name, parameter in self.parameters.items():
            vars(parameter).update(told["marks"].get(name, {}))
        self._kind, self.told = kind, told
        self.optimizer = build_optimizer(kind, told, self.parameters)
        self._lock = threading.RLock()
        self._inbox: list[deque[tuple[int, Collection[str], Tensor | None, bool]]] = [
            deque() for _ in range(num_workers)
        ]
        self._turn = 0
        self._window = 0
        self._num_last = 0
        self.updated_window = 0
        """The last window for which the unit was updated."""
        self._sum: Tensor | None = None
        self._gradients: dict[str, Tensor] | None = None
        self._reached: set[str] = set()
        self._num_edited = 0
        self._norms: dict[tuple[int, str], float] = {}  # squared norms, by number of edits and parameter name
        self._before_change: list[Callable[[Unit], None]] = []

    def add_groups(
        self, options: Sequence[Mapping[str, Any]], names: Sequence[Collection[str]], marks: Mapping[str, Any]
    ) -> None:
        """Add parameter groups that the workers' optimizer got; ``names`` may include parameters of other units. Between two updates."""
        with self._lock:
            for name in marks.keys() & self.parameters.keys():
                vars(self.parameters[name]).update(marks[name])
            self.told = self.told | {
                "marks": self.told["marks"] | marks,
                "groups": [*self.told["groups"], *options],
                "names": [*self.told["names"], *names],
            }
            groups = [[self.parameters[n] for n in of_group if n in self.parameters] for of_group in names]
            self._stepped |= {n for of_group in names for n in of_group if n in self.parameters}
            for parameter in (p for parameters in groups for p in parameters):
                parameter.requires_grad_()
            if self.optimizer is None:
                self.optimizer = build_optimizer(self._kind, self.told, self.parameters)
                return
            for given, parameters in zip(options, groups, strict=True):
                Optimizer.add_param_group(self.optimizer, {**given, "params": parameters})

    def begin_again(self, num_workers: int) -> None:
        """Prepare for ``num_workers`` new workers, which count windows from the beginning. Values and states stay; gradients of a step that
        was not committed are dropped."""
        with self._lock:
            self.forget()
            self._inbox = [deque() for _ in range(num_workers)]
            self._turn = self._window = self._num_last = self.updated_window = 0
            self._reached.clear()
            self._before_change.clear()

    # checkpoints

    def expect(self, read: "Callable[[Unit], None]") -> None:
        """Call ``read`` once, with the lock held, before anything here changes, or in :meth:`meet`."""
        with self._lock:
            self._before_change.append(read)

    def meet(self, read: "Callable[[Unit], None]") -> None:
        """Call ``read`` now, if :meth:`expect` has registered it and it was not called yet."""
        with self._lock:
            if read in self._before_change:
                self._before_change.remove(read)
                read(self)

    def _begin_change(self) -> None:
        while self._before_change:
            self._before_change.pop(0)(self)

    def _start(self) -> dict[str, Tensor]:
        """Return the parameters by name, without values yet."""
        self._values = torch.zeros(self.layout.numel, dtype=self.layout.dtype)
        return self.layout.views(self._values)

    def keep(self, values: Tensor, version: int) -> None:
        """Store values from a worker, (numel,), as version ``version``."""
        with self._lock:
            self._begin_change()
            self._follow(self._values, values)
            self.version = version

    def _follow(self, held: Tensor, values: Tensor) -> None:
        """Copy ``values`` to ``held``; masters that round to the same values stay."""
        with torch.no_grad():
            if self.layout.has_masters and self.version:
                values = torch.where(held.to(values.dtype) == values, held, values.to(held.dtype))
            held.copy_(values)

    def wait_for_writes(self) -> None:
        """Wait until all writes to the disk are complete."""

    @contextlib.contextmanager
    def values(self) -> Generator[Tensor, None, None]:
        """Yield the values in the type that workers have, (numel,); they are valid inside the ``with`` block."""
        yield self._values.to(self.layout.sent_dtype)

    def prepare(self, *, ahead: bool = False) -> bool:
        """Start to read what :meth:`update` needs, before it is called.

        Args:
            ahead: the gradients have not arrived yet; read only if there is room in memory now.

        Returns:
            Whether reading has started, or is not needed.
        """
        return True

    # gradients

    def spill(self) -> bool:
        """Start to write the sum of the gradients to disk, and free its memory afterwards; returns False if that is not possible."""
        return False

    def arrive(
        self, worker: int, window: int, touched: Collection[str], gradient: Tensor | None, *, is_last: bool = False
    ) -> bool:
        """Take a batch's gradient of one worker, (numel,), and add it when those of the workers before it have been added.

        Args:
            window: the number of the window; the first gradient of a new window drops the sum of the earlier one.
            touched: the parameters that got a gradient from a microbatch.
            gradient: None: it is included in the gradient of another worker, which speaks for this one. The unit may change the tensor.
            is_last: whether this is the last gradient of this worker in the window.

        Returns:
            Whether the last gradients of all workers have been added now.
        """
        with self._lock:
            is_complete = False
            self._inbox[worker].append((window, touched, gradient, is_last))
            while self._inbox[self._turn]:
                self.add(*self._inbox[self._turn].popleft())
                self._turn = (self._turn + 1) % len(self._inbox)
                is_complete = self._is_complete
            return is_complete

    @property
    def _is_complete(self) -> bool:
        """Whether the last gradients of all workers in the window have been added."""
        return self._num_last == len(self._inbox)

    def add(self, window: int, touched: Collection[str], gradient: Tensor | None, is_last: bool) -> None:
        """Add a worker's gradient of a window, if it has sent one; the lock must be held."""
        if window != self._window:
            self.forget()
            self._window = window
            self._reached.clear()
            self._num_last = 0
        self._num_last += is_last
        self._reached.update(touched)
        self._norms.clear()
        if gradient is None:
            return
        if self._sum is None:
            self._sum = gradient
        else:
            self._sum.add_(gradient)

    def forget(self) -> None:
        """Drop the sum of the gradients."""
        self._sum = self._gradients = None
        self._num_edited = 0
        self._norms.clear()

    def _edited(self, window: int, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """Return the gradients of a complete window, by name, in the parameters' type, after ``edits``."""
        if window != self._window or self._sum is None:
            return {}
        if self._gradients is None:
            views = self.layout.views(self._sum)
            self._gradients = {n: v.to(self.layout.dtype) for n, v in views.items() if n in self._reached}
        for kind, value in edits[self._num_edited :]:
            for name, gradient in self._gradients.items():
                if name in self._stepped:
                    gradient.mul_(value) if kind == "scale" else gradient.clamp_(-value, value)
        self._num_edited = max(self._num_edited, len(edits))
        return self._gradients

    def norm_squared(self, window: int, names: Collection[str], edits: Sequence[Edit]) -> float:
        """Return the squared norm of the gradients of ``names``, after ``edits``. A worker that asks after another one has edited the
        gradients further gets the result that was computed before.

        Raises:
            ConnectionLostError: the gradients were edited further before any worker asked for this norm.
        """
        with self._lock:
            gradients, after = self._edited(window, edits), len(edits)
            wanted = [name for name in gradients if name in names]
            missing = [name for name in wanted if (after, name) not in self._norms]
            if missing and after < self._num_edited:
                raise ConnectionLostError(
                    f"a worker asks for the norm of {missing[0]}'s gradient, which another one has clipped without asking: clip gradients alike "
                    f"on all ranks"
                )
            self._norms |= {(after, name): float(torch.linalg.vector_norm(gradients[name])) ** 2 for name in missing}
            return sum(self._norms[after, name] for name in wanted)

    def is_finite(self, window: int) -> bool:
        """Whether all gradients that the optimizer steps with are finite."""
        with self._lock:
            gradients = self._edited(window, ())
            return all(bool(g.isfinite().all()) for name, g in gradients.items() if name in self._stepped)

    # the optimizer

    def update(self, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        """Step with the gradients of the window.

        Raises:
            UnsupportedModuleError: the optimizer changes the options of its groups in a step, which the workers set.
        """
        with self._lock:
            self._begin_change()
            if self.optimizer is not None:
                self._step(self.optimizer, self._edited(window, edits), options)
            self.forget()
            self.updated_window = window
            self.version += 1

    def _step(
        self, optimizer: Optimizer, gradients: Mapping[str, Tensor], options: Sequence[Mapping[str, Any]]
    ) -> None:
        for name in self._stepped:
            self.parameters[name].grad = gradients.get(name)
        for group, given in zip(optimizer.param_groups, options, strict=True):
            group.update(given)
            if may_fuse(type(optimizer), given, self.layout.dtype):
                group["fused"] = True
        before = options_of(optimizer)
        optimizer.step()
        for number, (old, new) in enumerate(zip(before, options_of(optimizer), strict=True)):
            changed = [key for key in new if new[key] != old.get(key)]
            if changed:
                raise UnsupportedModuleError(
                    f"{type(optimizer).__name__} changes {changed[0]!r} of its parameter group {number} in each step, and an "
                    f"optimizer node gets options from the workers, where schedulers set them; use an optimizer that keeps count "
                    f"in its state, or optimizer_nodes=0"
                )
        for name in self._stepped:
            self.parameters[name].grad = None

    @contextlib.contextmanager
    def states(self, names: Collection[str]) -> Generator[dict[str, dict[str, Any]], None, None]:
        """Yield the optimizer states of the parameters ``names``; they are valid inside the ``with`` block."""
        state = {} if self.optimizer is None else self.optimizer.state
        found = {n: dict(state[p]) for n, p in self.parameters.items() if n in names and p in state}
        yield self._with_masters(found, names, self._values) if self.layout.has_masters else found

    def _with_masters(
        self, states: dict[str, dict[str, Any]], names: Collection[str], values: Tensor
    ) -> dict[str, dict[str, Any]]:
        masters = {n: v for n, v in self.layout.views(values).items() if n in names and n in self._stepped}
        return {n: states.get(n, {}) | {MASTER_WEIGHT: master} for n, master in masters.items()}

    def state_keys(self, names: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the keys of the states of ``names``, with the bytes of each tensor; 0 for other entries."""
        with self.states(names) as found:
            return {name: {key: _num_bytes(value) for key, value in state.items()} for name, state in found.items()}

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load optimizer states, as ``Optimizer.load_state_dict`` does: in the parameters' types."""
        if self.optimizer is None:
            return
        with self._lock:
            self._begin_change()
            self._load(self.optimizer, states)

    def _load(self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        for name in states if self.layout.has_masters else ():
            saved = states[name].get(MASTER_WEIGHT)
            if saved is not None:  # restore masters that round to the present values; other weights may be loaded
                sent, master = self.layout.sent_dtype, self.parameters[name].detach()
                master.copy_(torch.where(saved.to(sent) == master.to(sent), saved, master))
        states = {n: {k: v for k, v in state.items() if k != MASTER_WEIGHT} for n, state in states.items()}
        held = optimizer.state_dict()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names = {id(p): n for n, p in self.parameters.items()}
        held["state"] = {i: states[names[id(p)]] for i, p in enumerate(params) if states.get(names[id(p)])}
        optimizer.load_state_dict(held)


def _num_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
