"""StepObserver: the calls that the runner makes to report a step as it runs. This base class records nothing.

StepClock records when a rank computed and waited. An observer never changes the result of a step.
"""

from __future__ import annotations

from typing import Any

from lightning_holmes.plan.measured import EventKind
from lightning_holmes.plan.schedule import Action


class StepObserver:
    """The calls that the runner makes as it performs the actions of a step."""

    def mark(self) -> Any:
        """Return a mark of the current time, to be passed to :meth:`add`."""
        return None

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        """Report that something that began at the mark ``start`` ends now; returns the current mark."""
        return None

    def performed(self, action: Action) -> None:
        """Report that an action of the schedule is done, or has been started."""


UNOBSERVED = StepObserver()
