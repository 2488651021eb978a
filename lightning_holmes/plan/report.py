"""Prints a Plan to a terminal or a log file.

It owns the layout of the printed plan and decides nothing.

    print_plan(plan, parameter_counts=[120_000, 180_000])
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_holmes.plan.plan import GroupPlan, Plan

_WIDTH_WITHOUT_TERMINAL = 100
_GROUPS_SHOWN = 4


def plan_table(plan: Plan, *, parameter_counts: Sequence[int] | None = None) -> Table:
    """One row per pipeline rank: its clusters, stages, layers, parameters and global ranks.

    parameter_counts has one entry per stage, or is None where they are not known.
    """
    assert parameter_counts is None or len(parameter_counts) == plan.num_stages, parameter_counts
    table = Table(title=_title(plan), title_justify="left", title_style="bold")
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
            ", ".join(_spans(plan.partition.layers_of(stage)) for stage in stages),
        ]
        if parameter_counts is not None:
            cells.append(f"{sum(parameter_counts[stage] for stage in stages):,}")
        cells.append(_ranks_of(plan, pipeline_rank))
        table.add_row(*(Text(cell) for cell in cells))  # Text: brackets in names are not markup
    return table


def print_plan(plan: Plan, file: IO[str] | None = None, *, parameter_counts: Sequence[int] | None = None) -> None:
    """Print the table, the groups with their transports, and the notes; to standard output by default."""
    stream = file if file is not None else sys.stdout
    # without a terminal rich would use 80 columns
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(file=stream, width=width, highlight=False)
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
    return [(*kind, _group_ranks(groups)) for kind, groups in alike.items()]


def _print_item(console: Console, text: str) -> None:
    item = Table.grid(padding=(0, 1))
    item.add_row("-", Text(text))
    console.print(Padding(item, (0, 0, 0, 1), expand=False))


def _ranks_of(plan: Plan, pipeline_rank: int) -> str:
    """A pipeline rank's global ranks, with tensor groups in braces."""
    placement = plan.placement
    if plan.tensor_parallel_size == 1:
        return _spans(placement.grid[pipeline_rank])
    groups = [placement.tensor_parallel_group(pipeline_rank, data) for data in range(plan.data_parallel_size)]
    shown = " ".join("{" + _spans(group) + "}" for group in groups[:_GROUPS_SHOWN])
    more = len(groups) - _GROUPS_SHOWN
    return f"{shown} and {more} more groups" if more > 0 else shown


def _title(plan: Plan) -> str:
    tensor = f" x tensor {plan.tensor_parallel_size}" if plan.tensor_parallel_size > 1 else ""
    chunks = f" with {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    return (
        f"Plan: pipeline {plan.pipeline_parallel_size} x data {plan.data_parallel_size}{tensor}, "
        f"{plan.schedule}{chunks}, {plan.num_microbatches} microbatches "
        f"(evaluation {plan.eval_num_microbatches})"
    )


def _group_ranks(groups: Sequence[GroupPlan]) -> str:
    shown = "; ".join(_spans(group.ranks) for group in groups[:_GROUPS_SHOWN])
    more = len(groups) - _GROUPS_SHOWN
    ranks = "ranks " + shown
    return f"{ranks} and {more} more groups" if more > 0 else ranks


def _spans(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 3, 8 as "0-3, 8"; the given order is kept."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
