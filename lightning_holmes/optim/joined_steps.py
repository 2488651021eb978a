"""JoinedSteps: values that ranks collect in steps; a step runs when the first of its values is taken.

Values that are written one after the other need not be in memory together. The steps are collectives: every rank runs all of them in
the same order, whichever values it takes, and ends with :meth:`JoinedSteps.finish`.

    states = JoinedSteps([join_first, join_second])
    states.take("a", "exp_avg")     # runs the first step; its other values are kept until they are taken
    states.finish()                 # runs the second step, which other ranks may need
    more.follow(states)             # all steps of states run before the first step of more
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_holmes.comm.freed_memory import give_back_freed_memory

Step = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Collects some values; returns, for the names that this rank wants, their entries by key."""


class JoinedSteps:
    """Values that are collected step by step. All ranks must create one, of the same steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self._before: JoinedSteps | None = None
        self._found: dict[str, dict[str, Any]] = {}

    def follow(self, before: "JoinedSteps | None") -> None:
        """Run all steps of ``before`` before the first step of this one; its values must be taken before any are taken here."""
        self._before = before

    def take(self, name: str, key: str) -> Any:
        """Return an entry and remove it, running the steps up to the one that collects it. Each entry can be taken once."""
        while name not in self._found:
            self._run()
        return self._found[name].pop(key)

    def _run(self) -> None:
        self._finish_before()
        give_back_freed_memory()  # of the previous step's values, which are large
        self._found |= {name: dict(entries) for name, entries in self._steps.pop(0)().items()}

    def finish(self) -> None:
        """Run the steps that are left."""
        self._finish_before()
        self._found.clear()
        while self._steps:
            self._run()
            self._found.clear()

    def _finish_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.finish()
