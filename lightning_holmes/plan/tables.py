"""Tables in a terminal, and JSON: a run's plan, and the plans that a search found. docs/planning.md documents the JSON's keys.

print_plan(plan, parameter_counts=[120_000, 180_000])
print_search(result, cost_model)
json.dumps(search_data(result, cost_model))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.groups import GroupPlan
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.search import SearchResult

_WIDTH_WITHOUT_TERMINAL = 120  # rich would take 80 columns
_GROUPS_SHOWN = 4
_BREAK = "\n"
_GIB = 2.0**30

HEADINGS = (
    *("pipeline x tensor x data", "schedule", "micro-\nbatches", "layers", "step", "tokens/s", "TFLOPS/GPU", "MFU"),
    *("bubble", "memory\n/GPU"),
)


def prediction_cells(entry: Prediction) -> tuple[str, ...]:
    """One row of the table, in the order of HEADINGS."""
    run, layout = entry.run, entry.run.layout
    chunks = f" x{run.num_chunks}" if run.num_chunks > 1 else ""
    sharded = "parameters" if entry.sharded_parameters else "optimizer" if entry.sharded_optimizer else ""
    beside = f"\nsharded {sharded}" if sharded else ""
    beside += f"\n{entry.nodes.count} optimizer nodes" if entry.nodes is not None else ""
    tokens = entry.tokens_per_s
    return (
        f"{layout.pipeline} x {layout.tensor} x {layout.data}",
        f"{run.schedule.replace('eager_inter', f'eager_{_BREAK}inter')}{chunks}{beside}",
        f"{run.num_microbatches} of {run.microbatch_samples}",
        describe_counts(entry.partition.layer_counts),
        format_seconds(entry.step_s),
        f"{tokens:,.0f}" if tokens is not None else f"{entry.samples_per_s:,.1f} samples",
        f"{entry.flops_per_s_per_device / 1e12:.3g}",
        f"{entry.mfu:.1%}",
        f"{entry.timeline.bubble_share:.1%}",
        f"{max(entry.memory_bytes) / _GIB:.3g}\nof {min(entry.memory_limits) / _GIB:.3g} GiB",
    )


def describe_counts(counts: tuple[int, ...]) -> str:
    """Format layer counts: (8, 8, 8, 6) as "3 x 8, 6"."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    shown = [f"{number} x {count}" if number > 1 else str(count) for number, count in runs]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]])


def format_seconds(seconds: float) -> str:
    """Format with three digits, in ms below a second and in us below a millisecond; whole seconds from a thousand."""
    if 1e3 <= seconds < 1e6:
        return f"{seconds:,.0f} s"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def format_bytes(number: float) -> str:
    """Format with three digits and a decimal prefix, as is usual for network rates."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"


def make_console(file: IO[str] | None = None, *, width: int = _WIDTH_WITHOUT_TERMINAL) -> Console:
    """The console for a file; for standard output by default. ``width``: in columns, where it is no terminal."""
    stream = file if file is not None else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else width, highlight=False)


def print_search(result: SearchResult, cost_model: CostModel, file: IO[str] | None = None) -> None:
    """Print the best plan and its runners-up, the reason for it, and what was left out; to standard output by default."""
    console = make_console(file)
    console.print(Text(describe_task(cost_model)))
    if result.memory_note is not None:
        console.print(Text(f"WARNING: {result.memory_note}", style="bold red"))
    table = Table(
        title="Plans, the best first",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    entries = (result.best, *result.runners_up)
    rows = [prediction_cells(entry) for entry in entries]
    between = len(HEADINGS) + 1  # the box: one column before, between and after
    widths = column_widths([HEADINGS, *rows], console.width - between)
    for heading, width in zip(HEADINGS, widths, strict=True):
        table.add_column(Text(heading), width=width, overflow="fold")
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(*map(Text, row), style="bold" if entry is result.best else None)
    console.print(table)
    console.print(Text(f"Chosen: {result.best.run}: {result.best.reason}"))
    if result.sharding_note is not None:
        console.print(Text(result.sharding_note))
    if result.best.nodes is not None:
        console.print(Text(result.best.nodes.describe()))
    for number, entry in enumerate(result.runners_up, start=2):
        console.print(Text(f"  {number}. {entry.run}: {entry.reason}"))
    reasons = sorted(result.left_out.items(), key=lambda item: -item[1])
    left_out = f"; left out: {'; '.join(f'{count} {why}' for why, count in reasons)}" if reasons else ""
    lines = [*cost_model.network.link_notes(), f"{result.num_candidates} candidates{left_out}"]
    console.print(Text("\n".join(lines)))


def column_widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """The width of each column in characters, together at most ``available``. rich itself would exceed it if words are long, and cut
    off the last column. Columns are first narrowed where lines can break between words, then where words must be broken."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.splitlines()) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    while sum(widths) > max(available, len(widths)):
        spare = [width - word for width, word in zip(widths, words, strict=True)]
        narrowed = spare if max(spare) > 0 else widths
        widths[narrowed.index(max(narrowed))] -= 1
    return widths


def describe_task(cost_model: CostModel) -> str:
    """Describe the input of the search: the model, the devices, the batch."""
    model, clusters = cost_model.model, cost_model.network.topology.clusters
    places = ", ".join(
        f"{cluster.name}: "
        + " and ".join(
            f"{count} x {device.name}" + f" ({device.efficiency:.2f} of peak, {device.efficiency_source})"
            for device, count in types.items()
        )
        for cluster, types in zip(clusters, cost_model.device_types(), strict=True)
    )
    work = f", {(model.forward + model.backward) / model.microbatch_samples / 1e12:.3g} TFLOPs a sample"
    return (
        f"{model.name}: {model.num_layers} layers, {format_bytes(model.parameter_bytes)} of parameters"
        f"{work}; a batch of {cost_model.training.batch_samples}; {places}"
    )


def search_data(result: SearchResult, cost_model: CostModel) -> dict[str, Any]:
    """Plain data for JSON."""
    topology = cost_model.network.topology
    return {
        "model": asdict(cost_model.model),
        "batch_samples": cost_model.training.batch_samples,
        "clusters": [
            {
                "name": cluster.name,
                "devices": cluster.num_devices,
                "device_type": " and ".join(device.name for device in types),
                "device_types": {device.name: count for device, count in types.items()},
            }
            for cluster, types in zip(topology.clusters, cost_model.device_types(), strict=True)
        ],
        "best": result.best.to_data(),
        "runners_up": [entry.to_data() for entry in result.runners_up],
        "num_candidates": result.num_candidates,
        "left_out": dict(result.left_out),
        "memory_note": result.memory_note,
        "sharding_note": result.sharding_note,
        "link_notes": list(cost_model.network.link_notes()),
    }


def plan_table(plan: Plan, *, parameter_counts: Sequence[int] | None = None) -> Table:
    """One row per pipeline rank: its clusters, stages, layers, parameters and global ranks.

    parameter_counts has one entry per stage, or is None where they are not known.
    """
    assert parameter_counts is None or len(parameter_counts) == plan.num_stages, parameter_counts
    tensor = f" x tensor {plan.tensor_parallel_size}" if plan.tensor_parallel_size > 1 else ""
    chunks = f" with {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    title = (
        f"Plan: pipeline {plan.pipeline_parallel_size} x data {plan.data_parallel_size}{tensor}, "
        f"{plan.schedule}{chunks}, {plan.num_microbatches} microbatches "
        f"(evaluation {plan.eval_num_microbatches})"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("pipeline rank", justify="right")
    table.add_column("cluster")
    table.add_column("stage" if plan.num_chunks == 1 else "stages")
    table.add_column(Text(f"layers of {plan.layers}"))
    if parameter_counts is not None:
        table.add_column("parameters", justify="right")
    table.add_column("global ranks")
    for pipeline_rank in range(plan.pipeline_parallel_size):
        stages = plan.stages_of(pipeline_rank)
        cells = [
            str(pipeline_rank),
            plan.clusters[pipeline_rank],
            ", ".join(str(stage) for stage in stages),
            ", ".join(format_spans(plan.partition.layers_of(stage)) for stage in stages),
        ]
        if parameter_counts is not None:
            cells.append(f"{sum(parameter_counts[stage] for stage in stages):,}")
        cells.append(_ranks_of(plan, pipeline_rank))
        table.add_row(*(Text(cell) for cell in cells))  # Text: brackets in names are not markup
    return table


def print_plan(plan: Plan, file: IO[str] | None = None, *, parameter_counts: Sequence[int] | None = None) -> None:
    """Print the table, the groups with their transports, and the notes; to standard output by default."""
    console = make_console(file)
    console.print(plan_table(plan, parameter_counts=parameter_counts))
    if plan.groups:
        console.print(Text("Groups", style="bold"))
        for axis, transport, reason, ranks in group_rows(plan):
            _print_item(console, f"{axis} over {transport}: {reason} [{ranks}]")
    if plan.notes:
        console.print(Text("Choices", style="bold"))
        for note in plan.notes:
            _print_item(console, note)


def group_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(axis, transport, reason, ranks in words) of each kind of group; groups with equal axis, transport and reason share a row."""
    alike: dict[tuple[str, str, str], list[GroupPlan]] = {}
    for group in plan.groups:
        alike.setdefault((group.axis, group.transport, group.reason), []).append(group)
    return [
        (*kind, "ranks " + _first_groups("; ", [format_spans(group.ranks) for group in groups]))
        for kind, groups in alike.items()
    ]


def _print_item(console: Console, text: str) -> None:
    item = Table.grid(padding=(0, 1))
    item.add_row("-", Text(text))
    console.print(Padding(item, (0, 0, 0, 1), expand=False))


def _ranks_of(plan: Plan, pipeline_rank: int) -> str:
    """A pipeline rank's global ranks, with tensor groups in braces."""
    placement = plan.placement
    if plan.tensor_parallel_size == 1:
        return format_spans(placement.grid[pipeline_rank])
    groups = [placement.tensor_parallel_group(pipeline_rank, data) for data in range(plan.data_parallel_size)]
    return _first_groups(" ", ["{" + format_spans(group) + "}" for group in groups])


def _first_groups(separator: str, groups: Sequence[str]) -> str:
    more = len(groups) - _GROUPS_SHOWN
    return separator.join(groups[:_GROUPS_SHOWN]) + (f" and {more} more groups" if more > 0 else "")


def format_spans(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 3, 8 as "0-3, 8"; the given order is kept."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
