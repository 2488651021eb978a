"""AfterStep: calls a function once after each ``optimizer.step()``.

torch (2.13) calls an optimizer's step hooks for each class whose ``step`` runs: if a ``step`` calls ``super().step()``, the hooks also run
in the middle of the outer step.

    handle = AfterStep(optimizer, act)
    handle.remove()
"""

import inspect
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer


class AfterStep:
    """Calls ``act()`` after each step of ``optimizer``, until :meth:`remove`."""

    def __init__(self, optimizer: Optimizer, act: Callable[[], None]) -> None:
        self._act = act
        self._open: list[FrameType] = []  # frames of torch's step wrappers that have not ended, the outermost first
        self._handles = (optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end))

    def _begin(self, *_: Any) -> None:
        own = _caller()
        if self._open:  # drop the frames of steps that have raised
            callers = [frame for frame, _ in traceback.walk_stack(own)]
            self._open = [entry for entry in self._open if entry in callers]
        self._open.append(own)

    def _end(self, *_: Any) -> None:
        del self._open[self._open.index(_caller()) :]
        if not self._open:
            self._act()

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._open.clear()


def _caller() -> FrameType:
    """Return the frame that called the caller of this function."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return frame.f_back.f_back
