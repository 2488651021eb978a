"""Optimizer states while a hook of the user runs: a rank has those of what it steps, and a hook would take them for all.

    with hiding_states(trainer.strategy.optimizers, "Logs.on_train_batch_end"):
        ...                         # the user's hook; optimizer.state[p] raises, optimizer.state.clear() does what it says

The optimizer's own methods go on reading and writing them, but for ``state_dict``. Where optimizer nodes have the states nobody can read
them, in hooks or elsewhere: ``optimizer.state = StateOnNodes(optimizer)``.
"""

import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from torch.optim import Optimizer

from lightning_holmes.errors import UnsupportedModuleError

_OWN = {"lightning", "pytorch_lightning", __name__.partition(".")[0]}


class HiddenState(MutableMapping[Any, Any]):
    """Stands for ``optimizer.state``.

    Args:
        place: the user's hook, for messages.
    """

    def __init__(self, optimizer: Optimizer, place: str) -> None:
        self._optimizer, self._place = optimizer, place
        self.own: Any = optimizer.state

    def _shown(self) -> Any:
        """The states, to a method of the optimizer."""
        here: Any = inspect.currentframe()
        if not self.may_read(here.f_back.f_back):
            self._refuse()
        return self.own

    def may_read(self, frame: FrameType) -> bool:
        """Whether what runs in ``frame`` is the optimizer itself."""
        return frame.f_locals.get("self") is self._optimizer and frame.f_code.co_name != "state_dict"

    def _refuse(self) -> NoReturn:
        raise UnsupportedModuleError(
            f"{self._place} reads the state of {type(self._optimizer).__name__}, of which each rank has what it steps: that of "
            f"its own stages, or of its share of them. Read it in a checkpoint (optimizer_states), or use "
            f"pipeline_parallel_size=1 and sharded_optimizer=False"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._shown()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._shown()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._shown()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._shown()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def items(self) -> Any:
        return self._shown().items()

    def keys(self) -> Any:
        return self._shown().keys()

    def values(self) -> Any:
        return self._shown().values()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._shown().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._shown().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._shown().setdefault(key, default)

    def clear(self) -> None:
        """Forget all states, here those of this rank."""
        if isinstance(self.own, StateOnNodes):
            self.own.refuse_to_forget()
        self.own.clear()


class StateOnNodes(HiddenState):
    """The same, where optimizer nodes have it and this rank has none; for all but Lightning and this package, from now on."""

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
        """Lightning and this package only."""
        here: Any = inspect.currentframe()
        if not self.may_read(here.f_back):
            self.refuse_to_forget()
        self.own.clear()

    def refuse_to_forget(self) -> NoReturn:
        """The nodes would keep them."""
        raise UnsupportedModuleError(
            f"the state of {type(self._optimizer).__name__} is cleared, which optimizer nodes hold: begin a fit anew, or use "
            f"optimizer_nodes=0"
        )


@contextmanager
def hiding_states(optimizers: Sequence[Optimizer], place: str) -> Iterator[None]:
    """Inside, which is the user's ``place``, states cannot be read; they may be cleared, or replaced by none.

    Raises:
        UnsupportedModuleError: they are read, or others are put in their place.
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
