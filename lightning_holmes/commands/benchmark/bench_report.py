"""The results of a benchmark, as a table, as JSON and as a bar chart.

report = Report(...)
report.print()
report.write(Path("runs/bench"))               # bench.json and bench.png
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_holmes.errors import needs_extra

_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one contender.

    rank_steps_s: for each rank, the seconds of each step, of all rounds. ethernet_bytes, fast_bytes: bytes per step that a host sent on
    its Ethernet and on its other cards; received_bytes: bytes per step received on all cards; each the largest of all hosts. peak_bytes:
    the largest peak memory of a rank's process. plans: for each run of Holmes, its schedule and layers in words. seconds_by_kind: the
    seconds of a Holmes step by kind, averaged over ranks, if a timeline was recorded. problem: why results are missing. can_run: False
    if the contender cannot run on this network.
    """

    name: str
    title: str
    rank_steps_s: list[list[float]] = dataclasses.field(default_factory=list)
    ethernet_bytes: float = 0.0
    fast_bytes: float = 0.0
    received_bytes: float = 0.0
    peak_bytes: float = 0.0
    plans: list[str] = dataclasses.field(default_factory=list)
    seconds_by_kind: dict[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    can_run: bool = True

    @property
    def failed(self) -> bool:
        """Whether the contender could run, but no run succeeded."""
        return self.can_run and not self.rank_steps_s

    @property
    def step_s(self) -> float | None:
        """The median step of the slowest rank, in seconds; None without results."""
        return max(map(statistics.median, self.rank_steps_s)) if self.rank_steps_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all contenders, with the network, the command and facts about the machine."""

    results: list[Result]
    floor: str  # the name of the contender to which speeds are relative
    network: str
    command: str
    facts: dict[str, Any]
    unlike_hosts: bool = False

    @property
    def floor_s(self) -> float | None:
        """Seconds of a step without communication: of the slowest rank or, if hosts have unequal CPU shares,
        as if the work were distributed in proportion to their speeds."""
        floor = next((result for result in self.results if result.name == self.floor), None)
        if floor is None or floor.step_s is None or not self.unlike_hosts:
            return None if floor is None else floor.step_s
        return statistics.harmonic_mean(map(statistics.median, floor.rank_steps_s))

    def share(self, result: Result) -> float | None:
        """The contender's speed as a share of the floor's."""
        if result.step_s is None or self.floor_s is None:
            return None
        return self.floor_s / result.step_s

    def print(self) -> None:
        """Print the table, the plans of Holmes, and the problems."""
        table = Table(title=self.network)
        table.add_column("contender")
        for title in ("seconds a step", "share of the floor", "Ethernet MB a step", "fast MB a step", "peak RSS MB"):
            table.add_column(title, justify="right")
        for result in self.results:
            if result.step_s is None:
                table.add_row(result.title, *"-----")
                continue
            share = self.share(result)
            table.add_row(
                result.title,
                show_seconds(result.step_s),
                "-" if share is None else f"{share:.2f}",
                f"{result.ethernet_bytes / _MEGABYTE:.1f}",
                f"{result.fast_bytes / _MEGABYTE:.1f}",
                f"{result.peak_bytes / _MEGABYTE:.0f}",
            )
        # without a terminal the width is not known: use one at which no column is folded
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        watched = [result for result in self.results if result.seconds_by_kind]
        if watched:
            console.print(_kinds_table(watched))
        for result in self.results:
            for plan in dict.fromkeys(result.plans):
                console.print(f"{result.title}: {plan}", markup=False, highlight=False)
            if result.problem is not None:
                console.print(f"{result.title}: {result.problem}", markup=False, highlight=False)

    def as_data(self) -> dict[str, Any]:
        """The whole report as plain data for JSON."""
        return {
            "network": self.network,
            "command": self.command,
            **self.facts,
            "results": [
                {**dataclasses.asdict(result), "step_s": result.step_s, "share": self.share(result)}
                for result in self.results
            ],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write bench.json and bench.png; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(self.as_data(), indent=2) + "\n")
        return [folder / "bench.json", self._draw(folder / "bench.png")]

    def _draw(self, path: Path) -> Path:
        figure_class = load_figure_class()
        shown = [result for result in self.results if self.share(result) is not None]
        shares = [self.share(result) or 0.0 for result in shown]
        figure = figure_class(figsize=(8, 0.9 + 0.5 * max(1, len(shown))), layout="constrained")
        axes = figure.subplots()
        colors = ["tab:blue" if result.name.startswith("holmes") else "tab:gray" for result in shown]
        bars = axes.barh([result.title for result in shown], shares, color=colors)
        labels = [
            f"{share:.2f}  ({show_seconds(result.step_s or 0.0)} s)"
            for share, result in zip(shares, shown, strict=True)
        ]
        axes.bar_label(bars, labels, padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(1.0, *shares, 0.0))
        axes.set_xlabel("speed as a share of training without communication (seconds a step)")
        axes.set_title(self.network, fontsize=10, wrap=True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
        return path


_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "wait": "waiting for another stage, or for a transfer",
    "reduce": "gradient reduction that nothing hides",
    "update": "optimizer",
    "other": "all else: data, logs, checks, starting transfers",
}


def _kinds_table(results: Sequence[Result]) -> Table:
    table = Table(title="Seconds of a step, the mean of the ranks")
    table.add_column("of a step of middle length")
    for result in results:
        table.add_column(result.title, justify="right")
    for kind, title in _KINDS.items():
        table.add_row(title, *(f"{result.seconds_by_kind[kind]:.2f}" for result in results))
    shares = [_exposed_shares(result.seconds_by_kind) for result in results]
    table.add_row("waited, as a share of forward and backward", *(f"{waited:.1%}" for waited, _ in shares))
    table.add_row(
        "waited or reduced with nothing to hide it, of the step", *(f"{exposed:.1%}" for _, exposed in shares)
    )
    table.add_row("together", *(f"{sum(result.seconds_by_kind.values()):.2f}" for result in results))
    return table


def _exposed_shares(seconds: Mapping[str, float]) -> tuple[float, float]:
    """(waiting as a share of the computing time, which is a pipeline's bubble if transfers are overlapped; waiting plus reductions as a
    share of the step)."""
    computed = seconds["forward"] + seconds["backward"]
    exposed = seconds["wait"] + seconds["reduce"]
    return seconds["wait"] / (computed or 1.0), exposed / (sum(seconds.values()) or 1.0)


def mean_by_kind(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average seconds by kind over ranks or runs; empty if one of them has none."""
    if not found or not all(found):
        return {}
    return {kind: statistics.fmean(seconds[kind] for seconds in found) for kind in found[0]}


def show_seconds(seconds: float) -> str:
    """Format seconds with three significant digits, but two decimals from 1 second on."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"


def load_figure_class() -> Any:
    """matplotlib's Figure. Raises ConfigurationError if it is not installed."""
    with needs_extra("the chart", "plot"):
        from matplotlib.figure import Figure
    return Figure
