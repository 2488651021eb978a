"""StepObserver: who watches a step while the runner performs it. This one watches nothing.

StepClock notes when a rank computed and waited; SplitMeter times the parts of backwards. An observer never changes what
a step gives.
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
    """What the runner tells of a step, as it performs its actions."""

    minds_checkpointing = False
    """Whether it must be told of activation checkpointing, by :meth:`cannot_split`."""

    def mark(self) -> Any:
        """Now; to be given to :meth:`add`."""
        return None

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        """Something that began at the mark ``start`` ends now; gives the mark of now."""
        return None

    def forward(self, stage: int) -> AbstractContextManager[None]:
        """Around a forward of ``stage``."""
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
        """The backward of ``stage`` must stay whole."""

    def performed(self, action: Action) -> None:
        """An action of the schedule is done, or on its way."""


UNOBSERVED = StepObserver()
