"""Hides optimizer states while a hook of the user runs: a rank has only the states that it steps, and a hook would take them for all.

    with hiding_states(trainer.strategy.optimizers, "Logs.on_train_batch_end"):
        ...                         # the user's hook; optimizer.state[p] raises, optimizer.state.clear() works

The optimizer's own methods can still read and write the states, except ``state_dict``. A method other than ``step`` (schedule-free's ``eval``)
that asks for a state that this rank does not have is refused. If optimizer nodes hold the states, the user's code can
never read them, in hooks or elsewhere: ``optimizer.state = StateOnNodes(optimizer)``.
"""

import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import PACKAGES

_OWN = {*PACKAGES, __name__.partition(".")[0]}


def _reader() -> Any:
    """The frame of the code that reads a state: the innermost one that is neither of this file nor of a mapping's own methods."""
    frame: Any = inspect.currentframe()
    while frame.f_globals is globals() or frame.f_globals.get("__name__") == MutableMapping.pop.__module__:
        frame = frame.f_back
    return frame


class HiddenState(MutableMapping[Any, Any]):
    """Replaces ``optimizer.state``, and refuses reads by anything but the optimizer's own methods.

    Args:
        place: the user's hook, for messages.
    """

    def __init__(self, optimizer: Optimizer, place: str) -> None:
        self._optimizer, self._place = optimizer, place
        self.own: Any = optimizer.state

    def _shown(self, key: Any = None) -> Any:
        """Return the states, if the caller is a method of the optimizer, which may look for the one of ``key``; else raise UnsupportedModuleError."""
        frame = _reader()
        if not self.may_read(frame):
            self._refuse()
        if isinstance(key, Parameter) and key not in self.own and self._is_own_method(frame):
            raise UnsupportedModuleError(
                f"{type(self._optimizer).__name__}.{frame.f_code.co_name} reads the state of a parameter that this rank does not step, or "
                f'of which it steps a part: use pipeline_parallel_size=1, sharding="none" and optimizer_nodes=0'
            )
        return self.own

    def _is_own_method(self, frame: FrameType | None) -> bool:
        """Return whether the code of ``frame`` is a method of the optimizer's class, and not called by its ``step``."""
        if frame is None or frame.f_code.co_name in vars(Optimizer):
            return False
        while frame is not None:
            if frame.f_locals.get("self") is self._optimizer and frame.f_code.co_name == "step":
                return False
            frame = frame.f_back
        return True

    def may_read(self, frame: FrameType) -> bool:
        """Return whether the code of ``frame`` is a method of the optimizer, other than ``state_dict``."""
        return frame.f_locals.get("self") is self._optimizer and frame.f_code.co_name != "state_dict"

    def _refuse(self) -> NoReturn:
        raise UnsupportedModuleError(
            f"{self._place} reads the state of {type(self._optimizer).__name__}, of which each rank has what it steps: that of "
            f"its own stages, or of its share of them. Read it in a checkpoint (optimizer_states), or use "
            f'pipeline_parallel_size=1, sharding="none" and optimizer_nodes=0'
        )

    def __getitem__(self, key: Any) -> Any:
        return self._shown(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._shown()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._shown()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._shown(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._shown(key).get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._shown().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._shown(key).setdefault(key, default)

    def clear(self) -> None:
        """Clear all states of this rank."""
        if isinstance(self.own, StateOnNodes):
            self.own.refuse_to_forget()
        self.own.clear()


class StateOnNodes(HiddenState):
    """Replaces ``optimizer.state`` while optimizer nodes hold the states: only the optimizer, Lightning and this package may read it, in hooks and
    elsewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, "")

    def may_read(self, frame: FrameType) -> bool:
        return super().may_read(frame) or frame.f_globals.get("__name__", "").partition(".")[0] in _OWN

    def _refuse(self) -> NoReturn:
        raise UnsupportedModuleError(
            f"the state of {type(self._optimizer).__name__} is read, which optimizer nodes hold: read it in a checkpoint "
            f"(optimizer_states), or use optimizer_nodes=0"
        )

    def clear(self) -> None:
        """Clear all states; only the optimizer, Lightning and this package may."""
        if not self.may_read(_reader()):
            self.refuse_to_forget()
        self.own.clear()

    def refuse_to_forget(self) -> NoReturn:
        """Refuse to clear the states, since the nodes would keep them.

        Raises:
            UnsupportedModuleError: always.
        """
        raise UnsupportedModuleError(
            f"the state of {type(self._optimizer).__name__} is cleared, which optimizer nodes hold: begin a fit anew, or use "
            f"optimizer_nodes=0"
        )


@contextmanager
def hiding_states(optimizers: Sequence[Optimizer], place: str) -> Iterator[None]:
    """Inside, the user's code cannot read optimizer states; it may clear them, or replace them by empty ones. ``place``: the user's hook, for
    messages.

    Raises:
        UnsupportedModuleError: states are read, or replaced by others.
    """
    hidden = [HiddenState(optimizer, place) for optimizer in optimizers]
    for optimizer, state in zip(optimizers, hidden, strict=True):
        optimizer.state = state  # type: ignore[assignment]
    try:
        yield
        for optimizer, state in zip(optimizers, hidden, strict=True):
            given: Any = optimizer.state
            if given is not state and len(given):
                raise UnsupportedModuleError(
                    f"{place} gives {type(optimizer).__name__} other states, of which each rank would have to take its own part; "
                    f"give a checkpoint as ckpt_path"
                )
            if given is not state and isinstance(state.own, StateOnNodes) and not isinstance(given, StateOnNodes):
                state.own.refuse_to_forget()
            if given is not state:
                state.own = given
    finally:
        for optimizer, state in zip(optimizers, hidden, strict=True):
            optimizer.state = state.own
