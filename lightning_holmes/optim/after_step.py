"""Calls a function once after each ``optimizer.step()``.

torch (2.13) calls an optimizer's step hooks for each class whose ``step`` runs: if a ``step`` calls ``super().step()``, the hooks also run
in the middle of the outer step.

    handle = after_step(optimizer, act)
    handle.remove()
"""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def after_step(optimizer: Optimizer, act: Callable[[], None]) -> RemovableHandle:
    """Call ``act()`` after each step of ``optimizer``, until the returned handle is removed."""

    def stepped(*_: Any) -> None:
        frame: Any = inspect.currentframe()
        own = frame.f_back  # torch's wrapper of a step, of which each class has one with the same code
        outside = (f for f, _ in traceback.walk_stack(own.f_back) if f.f_code is own.f_code)
        if not any(f.f_locals.get("self") is optimizer for f in outside):
            act()

    return optimizer.register_step_post_hook(stepped)
