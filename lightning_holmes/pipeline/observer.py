"""StepObserver: the calls that the runner makes to report a step as it runs. This base class records nothing.

StepClock records when a rank computed and waited; SplitMeter times the parts of backwards. An observer never changes
the result of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_holmes.plan.measured import EventKind
from lightning_holmes.plan.schedule import Action


class StepObserver:
    """The calls that the runner makes as it performs the actions of a step."""

    minds_checkpointing = False
    """Whether the runner must report activation checkpointing, by :meth:`cannot_split`."""

    def mark(self) -> Any:
        """Return a mark of the current time, to be passed to :meth:`add`."""
        return None

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        """Report that something that began at the mark ``start`` ends now; returns the current mark."""
        return None

    def forward(self, stage: int) -> AbstractContextManager[None]:
        """Context around a forward of ``stage``."""
        return nullcontext()

    def backward(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        received: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        accumulate: Callable[[str, Tensor], None],
    ) -> None:
        """Run a whole backward of ``stage`` from ``roots``, whose gradients are ``gradients``."""
        torch.autograd.backward(list(roots), list(gradients))

    def cannot_split(self, stage: int) -> None:
        """Report that the backward of ``stage`` cannot be split."""

    def performed(self, action: Action) -> None:
        """Report that an action of the schedule is done, or has been started."""


UNOBSERVED = StepObserver()
