"""Draws timelines, with a row for each pipeline rank: forwards, backwards, transfers, reductions, and idle time.

    save_timeline_plot([prediction.timeline], "step.svg", title=str(prediction.run))
    save_timeline_plot([predicted, measured], "step.png", ranks=[(), (0, 2)])     # global ranks of the measured timeline

Several timelines (a predicted and a measured one) are drawn below each other on one time scale. Work that runs concurrently with
a rank's own work is a thin line below it. Needs matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.timeline import COMPUTE_KINDS, Span, Timeline

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "backward_input": "#2DB892",
    "backward_weight": "#8FD6C1",
    "transfer": "#E69F00",
    "reduce": "#D55E00",
    "update": "#56B4E9",
    "gather": "#CC79A7",
    "bucket_reduce": "#7A3600",
    "bucket_gather": "#6E3156",
    "wait": "#F7F3D0",
    "idle": "#EEEEEE",
}
# where in the row
_BESIDE = {"transfer": 0.21, "reduce": 0.31, "gather": 0.31, "bucket_reduce": 0.31, "bucket_gather": 0.31}
_ALSO_ALONE = ("reduce", "gather")  # also drawn as a rank's own work while the rank computes nothing
_MEANINGS = {
    "idle": "idle: nothing to do for this rank yet, the bubble",
    "wait": "waiting: held up by another rank",
    "bucket_reduce": "a bucket's reduction runs beside the backward; gradient reduction is what is left to wait for",
}
PLOT_FORMATS = (".png", ".svg")
_MOST_ROWS = 64
_MOST_NUMBERS = 400  # with more spans, microbatch numbers in the boxes are unreadable


def save_timeline_plot(
    timelines: Sequence[Timeline], path: str | Path, *, title: str = "", ranks: Sequence[Sequence[int]] = ()
) -> None:
    """Write the picture to a .png or .svg file. Raises ConfigurationError for other endings.

    Args:
        ranks: for each timeline the global ranks of its rows, if known.
    """
    ending = Path(path).suffix.lower()
    if ending not in PLOT_FORMATS:
        raise ConfigurationError(f"plot {str(path)!r}: the file's name must end in {' or '.join(PLOT_FORMATS)}")
    try:
        Path(path).write_bytes(_draw(timelines, title, ending[1:], ranks))
    except OSError as error:
        raise ConfigurationError(f"plot {str(path)!r} cannot be written: {error}") from error


def _draw(timelines: Sequence[Timeline], title: str, file_format: str, ranks: Sequence[Sequence[int]] = ()) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "a plot needs the package matplotlib, which is not installed: pip install lightning-holmes[plot]"
        ) from error
    rows = [min(timeline.num_ranks, _MOST_ROWS) for timeline in timelines]
    figure = Figure(figsize=(13, 1.3 + sum(0.9 + 0.34 * count for count in rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=[2 + count for count in rows])
    end = max(timeline.step_s for timeline in timelines)
    for axis, timeline, its_ranks in zip(axes[:, 0], timelines, ranks or [()] * len(timelines), strict=True):
        _draw_one(axis, timeline, end, its_ranks)
    meanings = "; ".join(text for kind, text in _MEANINGS.items() if kind in _kinds(timelines))
    axes[-1, 0].set_xlabel(f"seconds since the start of the step\n{meanings}", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    figure.legend(handles=_legend(timelines), loc="outside lower center", ncols=9, frameon=False)
    buffer = io.BytesIO()
    # a fixed salt, so that the same timeline gives the same file
    with matplotlib.rc_context({"svg.hashsalt": "lightning-holmes", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=file_format, dpi=110, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def _draw_one(axis: Any, timeline: Timeline, end: float, ranks: Sequence[int]) -> None:
    shown = timeline.spans[:_MOST_ROWS]
    numbers = sum(len(row) for row in shown) <= _MOST_NUMBERS
    for rank, row in enumerate(shown):
        axis.broken_barh([(0, timeline.step_s)], (rank - 0.4, 0.8), facecolors=COLOURS["idle"])
        for kind in COLOURS:
            spans = [span for span in row if span.kind == kind]
            if not spans:
                continue
            bars = [(span.start_s, span.end_s - span.start_s) for span in spans]
            drawn = [(bars, (rank + _BESIDE[kind], 0.09) if kind in _BESIDE else (rank - 0.4, 0.6))]
            if kind in _ALSO_ALONE:
                drawn.append((_alone(spans, row), (rank - 0.4, 0.6)))
            for parts, height in drawn:
                axis.broken_barh(parts, height, facecolors=COLOURS[kind], edgecolors="white", linewidths=0.4)
            if numbers and kind in ("forward", "backward", "backward_input", "backward_weight"):
                for span in spans:
                    middle = (span.start_s + span.end_s) / 2
                    if span.end_s - span.start_s > 0.008 * end:
                        text = str(span.microbatch)
                        axis.text(middle, rank - 0.1, text, ha="center", va="center", fontsize=6, color="white")
    more = timeline.num_ranks - len(shown)
    names = [f"stage {row}" + (f", rank {ranks[row]}" if ranks else "") for row in range(len(shown))]
    axis.set_yticks(range(len(shown)), names, fontsize=7)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.set_xlim(0, end)
    axis.set_title(
        f"{timeline.source}{' on ranks ' + ', '.join(map(str, ranks[:8])) if ranks else ''}"
        f"{', ...' if len(ranks) > 8 else ''}: {timeline.step_s:.4g} s, bubble {timeline.bubble_share:.1%}"
        + (f" (the first {len(shown)} of {timeline.num_ranks} ranks)" if more else ""),
        fontsize=9,
        loc="left",
    )
    axis.spines[["top", "right"]].set_visible(False)


def _alone(spans: Sequence[Span], row: Sequence[Span]) -> list[tuple[float, float]]:
    """The parts of ``spans``, (start, length) each, in which the rank computes nothing."""
    busy = [span for span in row if span.kind in COMPUTE_KINDS]
    parts = [(span.start_s, span.end_s) for span in spans]
    for other in busy:
        cut = [((a, min(b, other.start_s)), (max(a, other.end_s), b)) for a, b in parts]
        parts = [(a, b) for pair in cut for a, b in pair if b > a]
    return [(a, b - a) for a, b in parts]


def _kinds(timelines: Sequence[Timeline]) -> set[str]:
    return {span.kind for timeline in timelines for row in timeline.spans for span in row} | {"idle"}


def _legend(timelines: Sequence[Timeline]) -> list[Any]:
    from matplotlib.patches import Patch

    present = _kinds(timelines)
    names = {"reduce": "gradient reduction", "gather": "parameter gathering", "update": "optimizer"}
    names |= {"backward_input": "input backward", "backward_weight": "weight backward"}
    names |= {"bucket_reduce": "a bucket's reduction", "bucket_gather": "a bucket's gathering"}
    names |= {"wait": "waiting"}
    return [Patch(color=colour, label=names.get(kind, kind)) for kind, colour in COLOURS.items() if kind in present]
