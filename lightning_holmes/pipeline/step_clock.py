"""StepClock: notes when this rank computed, waited and communicated, step by step.

    clock.begin_step(7)
    start = clock.mark()
    ...
    clock.add("forward", start, stage=0, microbatch=3)

A mark is a reading of the host's clock; on CUDA an event in the current stream, which nothing waits for until the steps
are read. plan/measured.py joins the records of the ranks. Only the last steps are kept, so that a long run takes no more
memory than a short one.
"""

from __future__ import annotations

import collections
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_holmes.plan.measured import Event, EventKind, RankStep

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEPT_STEPS = 32
_KEPT_BESIDE = 1 << 14


@dataclass(slots=True)
class _Step:
    number: int
    began: Any
    events: list[tuple[EventKind, Any, Any, int, int]] = field(default_factory=list)
    ended: Any = None
    noted: int = 0
    """The number of events when the batch was done: later ones belong to the step only if the next batch follows at once."""


class StepObserver:
    """The calls by which the runner reports a step as it runs; this base class records nothing."""

    def mark(self) -> Any:
        """Return a mark of the current time, to be passed to :meth:`add`."""
        return None

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        """Report that something that began at the mark ``start`` ends now; returns the current mark."""
        return None


UNOBSERVED = StepObserver()


class StepClock(StepObserver):
    """The clock of one rank.

    Args:
        device: where the steps compute.
        rank: this rank's place in its pipeline.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.rank = rank
        self._device = device
        self._cuda = device.type == "cuda"
        self._steps: collections.deque[_Step] = collections.deque(maxlen=KEPT_STEPS)
        self._beside: collections.deque[tuple[EventKind, Any, Any]] = collections.deque(maxlen=_KEPT_BESIDE)
        self._open: _Step | None = None
        self._zero: tuple[Any, float] | None = None  # an event, and the host's clock when it was reached
        self._name = clock_name()

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        now = self.mark()
        if self._open is not None:
            self._open.events.append((kind, start, now, stage, microbatch))
        return now

    def add_beside(self, kind: EventKind, start: Any, end: Any) -> None:
        """Record what ran concurrently with the steps, between two marks; may be called from any thread."""
        self._beside.append((kind, start, end))

    @contextmanager
    def noting(self, kind: EventKind) -> Iterator[None]:
        """Context that records what runs inside."""
        start = self.mark()
        yield
        self.add(kind, start)

    @contextmanager
    def noting_update(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Context around an optimizer's step, which must call the closure that is yielded: records the time from the
        end of the closure, when the gradients are done, to the end of the step."""
        after: list[Any] = []

        def timed_closure() -> Any:
            result = closure()
            after[:] = [self.mark()]
            return result

        yield timed_closure
        if after:
            self.add("update", after[0])

    def begin_step(self, number: int) -> None:
        """Record that a training batch begins; the step before lasted until now."""
        now = self.mark()
        if self._cuda and self._zero is None:
            now.synchronize()
            self._zero = now, time.perf_counter()
        if self._open is not None:
            self._open.ended = now
            self._steps.append(self._open)
        self._open = _Step(number, now)

    def end_batch(self) -> None:
        """Record that the batch is done; the step ends here if no other follows at once."""
        if self._open is not None:
            self._open.ended = self.mark()
            self._open.noted = len(self._open.events)

    def interrupt(self) -> None:
        """Record that something other than the next training batch follows: validation, saving, the end."""
        if self._open is not None and self._open.ended is not None:
            del self._open.events[self._open.noted :]
            self._steps.append(self._open)
        self._open = None

    def steps(self) -> dict[int, RankStep]:
        """The kept steps that have ended, by number; on CUDA this synchronises the device."""
        if self._cuda and self._steps:
            torch.cuda.synchronize(self._device)
        beside = [Event(kind, self._seconds(start), self._seconds(end)) for kind, start, end in tuple(self._beside)]
        found = {}
        for step in self._steps:
            began, ended = self._seconds(step.began), self._seconds(step.ended)
            events = [
                Event(kind, self._seconds(start), self._seconds(end), stage, microbatch)
                for kind, start, end, stage, microbatch in step.events
            ]
            events += [
                event._replace(start_s=max(event.start_s, began), end_s=min(event.end_s, ended))
                for event in beside
                if event.start_s < ended and event.end_s > began
            ]
            found[step.number] = RankStep(
                rank=self.rank, clock=self._name, began_s=began, ended_s=ended, events=tuple(events)
            )
        return found

    def _seconds(self, mark: Any) -> float:
        if not self._cuda:
            return float(mark)
        assert self._zero is not None
        event, seconds = self._zero
        return seconds + float(event.elapsed_time(mark)) / 1e3


def clock_name() -> str:
    """A name that is the same on all processes that share the clock of ``time.perf_counter``: those of one booted kernel."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return str(uuid.getnode())
