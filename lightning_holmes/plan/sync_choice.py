"""Chooses the collective that sums a group's gradients, from measured seconds; and detects when to measure again. Pure.

choose({"all_reduce": 0.021, "p2p": 0.013})          # "p2p"
watch = DriftWatch()
watch.note(0.013)                                    # after each step; True if the last DRIFT_STEPS steps drifted
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

CLOSE = 0.05
"""Collectives within 5 % of the fastest count as equal, since timings vary by as much; the earlier one is then taken, as the simpler one."""
DRIFT_FACTOR = 2.0
DRIFT_STEPS = 20
MIN_BUCKET_BYTES = 2**20
_BASELINE_STEPS = 10


def choose(seconds: Mapping[str, float]) -> str:
    """Return the first collective that is within CLOSE of the fastest."""
    limit = min(seconds.values()) * (1 + CLOSE)
    return next(name for name, taken in seconds.items() if taken <= limit)


def bucket_bytes(total_bytes: float, *, latency_s: float, s_per_byte: float) -> int:
    """Return the bucket size in bytes that leaves the least reduction time exposed after a backward.

    A reduction of b bytes takes latency_s + b * s_per_byte. The last bucket's reduction cannot be overlapped, and
    each of the total_bytes / b buckets costs its latency: b * s_per_byte + total_bytes / b * latency_s is least at the
    square root of total_bytes * latency_s / s_per_byte. At most a quarter of total_bytes, so that most of the reduction can
    overlap whatever a reduction costs to start, and at least 1 MiB, since latency dominates below it.
    """
    best = math.sqrt(total_bytes * latency_s / max(s_per_byte, 1e-15))
    return max(MIN_BUCKET_BYTES, int(min(best, total_bytes / 4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoice:
    """The collective chosen for a group, and the reason.

    Attributes:
        stages: the stages whose gradients the group sums.
        ranks: the group's global ranks.
        collective: the name of the chosen collective.
        seconds: by name, the time of each candidate on its slowest member; empty if nothing was measured.
        num_bytes: the bytes that were summed in the measurement.
        reason: in one line.
        step: the training batch before which it was chosen.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    collective: str
    seconds: Mapping[str, float]
    num_bytes: int
    reason: str
    step: int = 0

    def describe(self) -> str:
        """The choice in one line."""
        stages = f"stage {', '.join(map(str, self.stages))}" if len(self.stages) == 1 else f"stages {self.stages}"
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        times = ", ".join(f"{name} {1e3 * taken:.3g} ms" for name, taken in self.seconds.items())
        measured = f" ({times} for {self.num_bytes / 1e6:.3g} MB)" if times else ""
        return f"gradients of {stages} over ranks {ranks}: {self.collective}{measured}; {self.reason}"


@dataclass(slots=True)
class DriftWatch:
    """Watches one number per step: the seconds to sum a byte of gradients.

    ``usual`` is the median of the first steps. A step counts as drifted if it took more than DRIFT_FACTOR times as long, or less
    than 1 / DRIFT_FACTOR; after DRIFT_STEPS such steps in a row it is time to measure again.
    """

    usual: float | None = None
    _first: list[float] = field(default_factory=list)
    _drifted: int = 0

    def note(self, seconds: float) -> bool:
        """Add a step; return whether at least the last DRIFT_STEPS steps all drifted."""
        if self.usual is None:
            self._first.append(seconds)
            if len(self._first) == _BASELINE_STEPS:
                self.usual = statistics.median(self._first)
            return False
        unlike = seconds > DRIFT_FACTOR * self.usual or seconds < self.usual / DRIFT_FACTOR
        self._drifted = self._drifted + 1 if unlike else 0
        return self._drifted >= DRIFT_STEPS

    def reset(self) -> None:
        """Forget ``usual`` and learn it again from the next steps."""
        self.usual = None
        self._first.clear()
        self._drifted = 0
