"""The results of a benchmark, as a table and as JSON.

report = Report(...)
report.print()
report.write(Path("runs/bench"))               # bench.json
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one contender.

    rank_steps_s: for each rank, the seconds of each step, of all rounds. ethernet_bytes, fast_bytes: bytes per step that a host sent on
    its Ethernet and on its other cards, each the largest of all hosts. peak_bytes: the largest peak memory of a rank's process. plans:
    for each run of Holmes, its schedule and layers in words. problem: why results are missing. can_run: False if the contender cannot
    run here.
    """

    name: str
    title: str
    rank_steps_s: list[list[float]] = dataclasses.field(default_factory=list)
    ethernet_bytes: float = 0.0
    fast_bytes: float = 0.0
    peak_bytes: float = 0.0
    plans: list[str] = dataclasses.field(default_factory=list)
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
    """The results of all contenders, with the network, the command and facts about the machine.

    floor: the name of the contender to which speeds are relative. unlike_hosts: the hosts have unequal shares of the CPU.
    """

    results: list[Result]
    floor: str
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
        for result in self.results:
            for plan in dict.fromkeys(result.plans):
                console.print(f"{result.title}: {plan}", markup=False, highlight=False)
            if result.problem is not None:
                console.print(f"{result.title}: {result.problem}", markup=False, highlight=False)

    def write(self, folder: Path) -> Path:
        """Write bench.json; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        results = [
            {**dataclasses.asdict(result), "step_s": result.step_s, "share": self.share(result)}
            for result in self.results
        ]
        data = {"network": self.network, "command": self.command, **self.facts, "results": results}
        (folder / "bench.json").write_text(json.dumps(data, indent=2) + "\n")
        return folder / "bench.json"


def show_seconds(seconds: float) -> str:
    """Format seconds with three significant digits, but two decimals from 1 second on."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"
