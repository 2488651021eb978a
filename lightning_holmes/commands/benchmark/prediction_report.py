"""The results of predicted runs: a table, JSON to which later runs are added, and a scatter plot of predicted and measured steps.

report = PredictionReport.load(folder, facts)
report.add(runs)
report.print()
report.write(folder)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_holmes.commands.benchmark.bench_report import load_figure_class, show_seconds

_FILE = "predictions"
_APART = 1.1  # plans that differ by more in measurement must be predicted in the same order
_MEDIAN, _WORST = 0.08, 0.20  # aims: the largest allowed errors


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """One run. model: size and batch of the model, in words. round: the number of this run of several runs of a case. schedule: with its
    number of microbatches; runs of one bed and model with the same layers and schedule are runs of one plan, whichever case they belong to.

    measured_s: the lower quartile of the slowest rank's steps, since other work on the machine only makes steps longer.
    """

    bed: str
    name: str
    model: str
    layers: tuple[int, ...]
    predicted_s: float
    measured_s: float
    round: int = 1
    schedule: str = ""

    @property
    def plan(self) -> tuple[str, ...]:
        """A key that is equal for runs of one plan; by name if the schedule is not known."""
        return (self.bed, self.model, str(self.layers), self.schedule) if self.schedule else (self.bed, self.name)

    @property
    def error(self) -> float:
        """The relative error, positive if the predicted step was too long."""
        return self.predicted_s / self.measured_s - 1


@dataclass(slots=True, kw_only=True)
class PredictionReport:
    """All runs so far, and facts about the machine and the command of the last runs."""

    runs: list[PredictedRun] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, facts: dict[str, Any]) -> PredictionReport:
        """Read the report in a folder, to add runs to it; an empty report if there is none."""
        path = folder / f"{_FILE}.json"
        if not path.exists():
            return cls(facts=facts)
        names = {entry.name for entry in dataclasses.fields(PredictedRun)}
        runs = [{name: run[name] for name in names & run.keys()} for run in json.loads(path.read_text())["runs"]]
        return cls(runs=[PredictedRun(**{**run, "layers": tuple(run["layers"])}) for run in runs], facts=facts)

    def add(self, runs: Sequence[PredictedRun]) -> None:
        """Add runs; earlier runs with the same bed and name are replaced."""
        new = {(run.bed, run.name) for run in runs}
        self.runs = [run for run in self.runs if (run.bed, run.name) not in new] + list(runs)

    def case_errors(self) -> list[float]:
        """The median of the rounds' signed errors, for each case: on a shared machine, a round may be slower while it is
        predicted than while it runs, or the reverse."""
        rounds: dict[tuple[str, str], list[float]] = {}
        for run in self.runs:
            rounds.setdefault((run.bed, run.name), []).append(run.error)
        return [statistics.median(errors) for errors in rounds.values()]

    @property
    def median_error(self) -> float:
        """The median of the absolute values of the cases' errors."""
        return statistics.median(map(abs, self.case_errors()))

    @property
    def worst_error(self) -> float:
        """The largest absolute value of the cases' errors."""
        return max(map(abs, self.case_errors()))

    @property
    def worst_run_error(self) -> float:
        """The largest absolute error of a single run."""
        return max(abs(run.error) for run in self.runs)

    def misordered(self) -> list[tuple[PredictedRun, PredictedRun]]:
        """Pairs of plans for one model on one bed that are measured more than 10 % apart and predicted in the wrong order; each plan
        has the means of its runs."""
        return [
            (one, other)
            for one, other in itertools.permutations(self._plans(), 2)
            if (one.bed, one.model) == (other.bed, other.model)
            and other.measured_s > _APART * one.measured_s
            and other.predicted_s <= one.predicted_s
        ]

    def _plans(self) -> list[PredictedRun]:
        rounds: dict[tuple[str, ...], list[PredictedRun]] = {}
        for run in self.runs:
            rounds.setdefault(run.plan, []).append(run)
        return [
            dataclasses.replace(
                runs[0],
                predicted_s=statistics.fmean(run.predicted_s for run in runs),
                measured_s=statistics.fmean(run.measured_s for run in runs),
            )
            for runs in rounds.values()
        ]

    def missed(self) -> list[str]:
        """The aims that are missed, in words."""
        found = []
        for name, error, most in (("median", self.median_error, _MEDIAN), ("worst", self.worst_error, _WORST)):
            if error > most:
                found.append(f"{name} error {error:.1%}, wanted at most {most:.0%}")
        wrong = self.misordered()
        if wrong:
            pairs = "; ".join(f"{one.name} was faster than {other.name}" for one, other in wrong)
            found.append(f"plans predicted in the wrong order: {pairs}")
        return found

    def print(self) -> None:
        """Print the table and its summary."""
        table = Table(title="Steps, predicted before the first one and measured")
        for title in ("bed", "run", "model", "layers"):
            table.add_column(title)
        for title in ("predicted", "measured", "error"):
            table.add_column(title, justify="right")
        for run in self.runs:
            table.add_row(
                run.bed,
                run.name if run.round == 1 else f"{run.name}, round {run.round}",
                run.model,
                ", ".join(map(str, run.layers)),
                f"{show_seconds(run.predicted_s)} s",
                f"{show_seconds(run.measured_s)} s",
                f"{run.error:+.1%}",
            )
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        cases, runs = len(self.case_errors()), len(self.runs)
        single = f" (the worst of {runs} single runs {self.worst_run_error:.1%})" if runs > cases else ""
        console.print(
            f"{cases} cases: median error {self.median_error:.1%}, worst {self.worst_error:.1%}{single}; "
            f"{len(self.misordered())} pairs of plans in the wrong order"
        )

    def write(self, folder: Path) -> list[Path]:
        """Write predictions.json and predictions.png; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            **self.facts,
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "worst_run_error": self.worst_run_error,
            "misordered": [[one.name, other.name] for one, other in self.misordered()],
            "runs": [{**dataclasses.asdict(run), "error": run.error} for run in self.runs],
        }
        path = folder / f"{_FILE}.json"
        path.write_text(json.dumps(data, indent=2) + "\n")
        return [path, self._draw(folder / f"{_FILE}.png")]

    def _draw(self, path: Path) -> Path:
        figure = load_figure_class()(figsize=(6, 6), layout="constrained")
        axes = figure.subplots()
        largest = 1.15 * max(max(run.predicted_s, run.measured_s) for run in self.runs)
        axes.plot([0, largest], [0, largest], color="gray", linewidth=1)
        axes.fill_between([0, largest], [0, 0.8 * largest], [0, 1.2 * largest], color="gray", alpha=0.12, label="20 %")
        for bed in dict.fromkeys(run.bed for run in self.runs):
            mine = [run for run in self.runs if run.bed == bed]
            axes.scatter([run.measured_s for run in mine], [run.predicted_s for run in mine], label=bed, s=28)
        axes.set_xlim(0, largest)
        axes.set_ylim(0, largest)
        axes.set_xlabel("measured seconds a step")
        axes.set_ylabel("predicted seconds a step")
        axes.set_title(f"median error {self.median_error:.1%}, worst {self.worst_error:.1%}", fontsize=10)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
        return path
