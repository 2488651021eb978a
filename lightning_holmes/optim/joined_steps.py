"""JoinedSteps: values that ranks bring together in steps, each step when one of its values is taken first.

What is written one after the other need not be in memory together. The steps are collectives: every rank runs all of them in the
same order, whatever it takes, and ends with :meth:`JoinedSteps.finish`.

    states = JoinedSteps([join_first, join_second])
    states.take("a", "exp_avg")     # runs the first step; what else it brought waits for who takes it
    states.finish()                 # runs the second, for those who take from it
    more.follow(states)             # before the first step of more all of states' are run
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_holmes.comm.freed_memory import give_back_freed_memory

Step = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Brings, of some names, those that this rank wants: their entries by key."""


class JoinedSteps:
    """All ranks make one, of the same steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self._before: JoinedSteps | None = None
        self._found: dict[str, dict[str, Any]] = {}

    def follow(self, before: "JoinedSteps | None") -> None:
        """Whoever takes from ``before`` does it before anything is taken here."""
        self._before = before

    def take(self, name: str, key: str) -> Any:
        """An entry, once."""
        while name not in self._found:
            self._run()
        return self._found[name].pop(key)

    def _run(self) -> None:
        self._finish_before()
        give_back_freed_memory()  # of the values before, which are large
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
