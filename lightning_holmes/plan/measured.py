"""Measured timelines: the labels in Chrome traces of one step, a trace for each rank of a pipeline, as a Timeline to draw below the predicted one.

    rows = [spans_of_trace(json.loads(path.read_text())) for path in ("trace-rank0.json", "trace-rank1.json")]
    timeline = make_measured_timeline(rows)

comm/label.py and torch write the labels. On a GPU the spans are those of the work on the device. The clocks of hosts are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_holmes.plan.timeline import BESIDE_KINDS, COMPUTE_KINDS, Span, SpanKind, Timeline

_LABEL = re.compile(
    r"holmes: (?P<action>forward|backward|backward input|backward weight) of stage (?P<stage>\d+), microbatch (?P<microbatch>\d+)"
    r"|holmes: (?P<bucket>bucket reduce|bucket gather) |holmes: wait for (?P<wait>.*)|Optimizer\.step#"
)
SUMS = "the sums of gradients"
"""What a rank waits for, in the label, when it reduces gradients."""


def spans_of_trace(trace: Mapping[str, Any]) -> list[Span]:
    """Return the labelled work in a Chrome trace, in seconds of the host's clock."""
    zero_s = trace.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    spans = []
    for event in on_device or events:
        found = _LABEL.match(event["name"])
        if found is not None:
            start_s = zero_s + event["ts"] / 1e6
            stage, microbatch = (int(found[part] or -1) for part in ("stage", "microbatch"))
            kind = (found["action"] or found["bucket"] or "update").replace(" ", "_")
            if found["wait"] is not None:
                kind = "reduce" if found["wait"] == SUMS else "wait"
            spans.append(Span(cast("SpanKind", kind), start_s, start_s + event["dur"] / 1e6, stage, microbatch))
    return spans


def make_measured_timeline(rows: Sequence[Sequence[Span]]) -> Timeline:
    """Make the timeline of one step of one pipeline from the spans of its ranks."""
    zero_s = min(span.start_s for row in rows for span in row)
    shown = tuple(
        tuple(sorted((_own_part(span, row, zero_s) for span in row), key=lambda span: span.start_s)) for row in rows
    )
    return Timeline(
        spans=shown,
        step_s=max(span.end_s for row in shown for span in row),
        exposed_s={"data_parallel": sum(s.end_s - s.start_s for row in shown for s in row if s.kind == "reduce")},
        peak_memory_bytes=(0.0,) * len(rows),
        source="measured",
    )


def _own_part(span: Span, row: Sequence[Span], zero_s: float) -> Span:
    """The part of a computation after what it contains: a forward waits for its activation first, and an optimizer's step runs its closure."""
    inside = [
        other.end_s
        for other in row
        if other is not span
        and other.kind not in BESIDE_KINDS
        and span.start_s <= other.start_s
        and other.end_s <= span.end_s
    ]
    start_s = max([span.start_s, *inside]) if span.kind in COMPUTE_KINDS else span.start_s
    return span._replace(start_s=start_s - zero_s, end_s=span.end_s - zero_s)
