"""Timeline: the spans of work of each pipeline rank in one step. Plain data, predicted or measured.

The simulator makes one from a plan; a monitored run makes one from the labels in its traces. Both are drawn by the same plot.

    timeline.step_s, timeline.bubble_share, timeline.exposed_s["data_parallel"], timeline.peak_memory_bytes[0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

SpanKind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "transfer",
    "reduce",
    "update",
    "gather",
    "bucket_reduce",
    "bucket_gather",
    "wait",
]
BESIDE_KINDS = ("transfer", "bucket_reduce", "bucket_gather")
"""Kinds that run concurrently with a rank's own work."""
COMPUTE_KINDS = ("forward", "backward", "backward_input", "backward_weight", "update")


class Span(NamedTuple):
    """Work of one kind on a rank from start_s to end_s, in seconds since the step's start.

    A transfer belongs to the sender. stage is -1 for work that belongs to no stage, microbatch for work that belongs to none. Only
    measured timelines have wait (for another rank), and the collectives of single buckets that run during computation (bucket_reduce,
    bucket_gather); there, reduce is the time the rank waited.
    """

    kind: SpanKind
    start_s: float
    end_s: float
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of one step.

    Attributes:
        spans: by pipeline rank, ordered by start.
        step_s: seconds from the start of the step to the end of its last rank.
        exposed_s: for each axis, the seconds that ranks waited for its transfers and did nothing else, summed
            over pipeline ranks. For the pipeline, only the time after the sender had the tensor counts.
        peak_memory_bytes: for each rank; zeros if memory is not known.
        source: "predicted" or "measured".
    """

    spans: tuple[tuple[Span, ...], ...]
    step_s: float
    exposed_s: dict[str, float]
    peak_memory_bytes: tuple[float, ...]
    source: Literal["predicted", "measured"] = "predicted"

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.spans)

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computed, including tensor-parallel transfers inside of its computations."""
        return sum(span.end_s - span.start_s for span in self.spans[rank] if span.kind in COMPUTE_KINDS)

    @property
    def bubble_share(self) -> float:
        """Share of the ranks' time in which they neither computed nor waited for a transfer."""
        if self.step_s == 0:
            return 0.0
        total = self.num_ranks * self.step_s
        busy = sum(self.busy_s(rank) for rank in range(self.num_ranks))
        waited = self.exposed_s.get("pipeline", 0.0) + self.exposed_s.get("data_parallel", 0.0)
        return max(0.0, (total - busy - waited) / total)
