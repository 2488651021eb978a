"""The result of ``check``: a plain and a staged run of a step compared value by value, as a table.

rows = compare("training_step", plain, staged, tolerance=1e-5)         # outcomes
CheckReport(module="GPT", layers="blocks", stages=(2, 2), num_microbatches=4, tolerance=1e-5, rows=rows).print()
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.replay import LogCall, MetricValue

_ROUNDING = 1e-3
"""A relative difference below this may be due to rounding in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one step, and the state it left on the module.

    Attributes:
        output: what the step returned.
        calls: its log calls, in order.
        gradients: by parameter name; empty for a step that does not train.
        state: buffers, metrics and plain attributes, by name.
        stages_of: gives the stages that hold a parameter; none if the module is not split.
    """

    output: Any
    calls: Sequence[LogCall]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Any]
    stages_of: Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared value: its name, both results as text, their relative difference, and a reason if they are not equal."""

    step: str
    what: str
    plain: str
    staged: str
    relative: float
    ok: bool
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """The outcome of :func:`check`.

    Attributes:
        refused: why the module cannot run as this pipeline; None if it can.
        dependence: why microbatches cannot give the numbers of the whole batch, even if both runs agree on the same
            microbatches; None if no reason was found.
        notes: messages about hooks before the first step that failed outside of a Trainer run and were left out.
    """

    module: str
    layers: str
    stages: tuple[int, ...]
    num_microbatches: int
    tolerance: float
    rows: list[Difference] = field(default_factory=list, repr=False)
    refused: str | None = None
    dependence: str | None = None
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the module was not refused, and all values of the two runs over the same microbatches are equal
        within the tolerance."""
        return self.refused is None and all(row.ok for row in self.rows)

    @property
    def exact(self) -> bool:
        """Whether ``ok`` holds and microbatches also give the numbers of the whole batch."""
        return self.ok and self.dependence is None

    def __str__(self) -> str:
        """The table, as :meth:`print` shows it."""
        console = Console(width=120, file=io.StringIO())
        self.print(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    def print(self, console: Console | None = None) -> None:
        """Print a table: all equal outputs and logs, the five equal gradients that differ most, and up to 20 values
        that differ."""
        console = console or Console(width=None if Console().is_terminal else 120)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
        if self.refused is not None:
            console.print(f"[bold red]refused[/]: {self.module} cannot run as this pipeline", highlight=False)
            console.print(self.refused, highlight=False, markup=False)
            return
        table = Table(
            title=f"{self.module}: {self.layers} as {len(self.stages)} stages of {list(self.stages)} layers, "
            f"{self.num_microbatches} microbatches",
            title_justify="left",
        )
        for column in ("step", "what", "plain", "staged", "relative difference", ""):
            table.add_column(column, overflow="fold")
        differing = [row for row in self.rows if not row.ok]
        gradients = sorted((r for r in self.rows if r.ok and r.what.startswith("gradient")), key=lambda r: -r.relative)
        others = [r for r in self.rows if r.ok and not r.what.startswith(("gradient", "state"))]
        for row in others + gradients[:5] + differing[:20]:
            mark = "[green]equal[/]" if row.ok else f"[bold red]differs[/] {row.reason}"
            table.add_row(row.step, row.what, row.plain, row.staged, f"{row.relative:.1e}", mark)
        console.print(table)
        equal = f"{len(self.rows)} values equal within {self.tolerance:g}"
        if differing:
            verdict = f"[bold red]{len(differing)} of {len(self.rows)} values differ[/] by more than {self.tolerance:g}"
        elif self.exact:
            verdict = f"[bold green]exact[/]: {equal}"
        else:
            verdict = f"[bold yellow]exact with num_microbatches=1 only[/]: {equal} over the same microbatches, but"
        console.print(verdict, highlight=False)
        if self.dependence is not None:
            console.print(f"{self.dependence}. A run that is not told a number takes 1", highlight=False, markup=False)


def compare(step: str, plain: Outcome, staged: Outcome, tolerance: float) -> list[Difference]:
    """Compare two outcomes: one row for each value of the plain run, and for each log call of the staged run only."""
    rows = _compare_trees(step, "output", plain.output, staged.output, tolerance)
    names = [c.name for c in plain.calls], [c.name for c in staged.calls]
    if names[0] != names[1]:
        rows.append(_missing(step, "logs", names[0], f"logged are {names[1]}"))
    logs, others = _by_call(plain.calls), _by_call(staged.calls)
    for name, value in logs.items():
        if isinstance(value, MetricValue):
            continue
        if name not in others:
            rows.append(_missing(step, f"log {name}", value, "not logged by the staged run"))
        else:
            rows += _compare_trees(step, f"log {name}", value, others[name], tolerance)
    for name in sorted(set(others) - set(logs)):
        rows.append(_missing(step, f"log {name}", others[name], "logged by the staged run only"))
    scale = max((float(g.abs().max()) for g in plain.gradients.values() if g is not None and g.numel()), default=0.0)
    for name, gradient in plain.gradients.items():
        other = staged.gradients.get(name)
        what = f"gradient {name}"
        if gradient is None or other is None:
            none = (gradient is None or not bool(gradient.any())) and (other is None or not bool(other.any()))
            if not none:
                rows.append(_missing(step, what, gradient, "has a gradient in one run only"))
            continue
        row = _difference(step, what, gradient, other, tolerance, floor=scale * 1e-4)
        rows.append(replace(row, reason=_where(staged.stages_of(name), row)))
    before, after = plain.state, staged.state
    for name, value in before.items():
        if name in after:
            rows += _compare_trees(step, f"state {name}", value, after[name], tolerance)
        else:
            rows.append(_missing(step, f"state {name}", value, "no stage of the staged run has it"))
    return rows


def _by_call(calls: Sequence[LogCall]) -> dict[str, Any]:
    """Logged values by name; further values of the same name have the key ``name, call N``."""
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for call in calls:
        seen[call.name] += 1
        found[call.name if seen[call.name] == 1 else f"{call.name}, call {seen[call.name]}"] = call.value
    return found


def _where(stages: Sequence[int], row: Difference) -> str:
    """Give a reason why a parameter's gradient differs: the stages that compute it, and whether rounding may explain it."""
    if row.ok or not stages:
        return row.reason
    place = ("shared by stages " if len(stages) > 1 else "on stage ") + ", ".join(map(str, stages))
    reason = row.reason.strip("()")
    if not reason and row.relative < _ROUNDING:
        reason = "so little may be rounding, as sums are taken in another order; try it in double precision"
    return f"({place}{': ' if reason else ''}{reason})"


def _compare_trees(step: str, what: str, plain: Any, staged: Any, tolerance: float) -> list[Difference]:
    left, right = tree.flatten(plain), tree.flatten(staged)
    if len(left[1]) != len(right[1]):
        return [_missing(step, what, plain, f"{len(left[1])} tensors against {len(right[1])}")]
    rows = [_difference(step, what, a, b, tolerance) for a, b in zip(left[1], right[1], strict=True)]
    mine, theirs = _numbers(plain), _numbers(staged)
    if len(mine) != len(theirs):
        return [*rows, _missing(step, what, plain, f"{len(mine)} numbers against {len(theirs)}")]
    for one, other in zip(mine, theirs, strict=True):
        rows.append(_difference(step, what, torch.as_tensor(one), torch.as_tensor(other), tolerance))
    return rows


def _numbers(value: Any) -> list[Any]:
    """The numbers and arrays in a tree, in order."""
    if isinstance(value, (int, float)):
        return [value] if abs(value) < 2**63 or isinstance(value, float) else [float(value)]
    if isinstance(value, (np.number, np.ndarray)) and value.dtype.kind in "biufc":
        return [value]
    return [n for _, child in tree.children_of(value) for n in _numbers(child)] if tree.is_container(value) else []


def _difference(
    step: str, what: str, plain: Tensor, staged: Tensor, tolerance: float, floor: float = 0.0
) -> Difference:
    if plain.shape != staged.shape:
        return _missing(step, what, plain, f"shapes {tuple(plain.shape)} and {tuple(staged.shape)}")
    a, b = _as_double(plain), _as_double(staged)
    if a.numel() == 0:
        relative = 0.0
    else:
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, torch.zeros_like(a), (a - b).abs())
        size = max(float(a.nan_to_num().abs().max()), floor, 1e-30)
        relative = float(gap.max()) / size
        if math.isnan(relative):
            relative = math.inf
    ok = relative <= tolerance
    is_lost = not ok and bool(b.isnan().any())
    reason = "(NaN: a value does not reach the stage that needs it)" if is_lost else ""
    return Difference(
        step=step, what=what, plain=_short(plain), staged=_short(staged), relative=relative, ok=ok, reason=reason
    )


def _as_double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _missing(step: str, what: str, value: Any, reason: str) -> Difference:
    return Difference(
        step=step, what=what, plain=_short(value), staged="", relative=math.inf, ok=False, reason=f"({reason})"
    )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and value.layout is torch.strided:
            return f"{float(value):.7g}"
        return f"{list(value.shape)} norm {float(_as_double(value).norm()):.6g}"
    return str(value)[:40]
