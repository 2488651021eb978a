"""TimelineMonitor: a timeline of what each rank did in a real step, written into the run's folder.

    Trainer(strategy=HolmesStrategy(monitor=True))               # or monitor=100: also every 100 steps
    Trainer(strategy="holmes", callbacks=[TimelineMonitor(every_n_steps=100)])

At the end of fit (and every n steps) the records of the last steps are gathered from all ranks. The step of median
duration becomes one Timeline per replica in ``timeline.json``, and is drawn in ``timeline.png`` next to the predicted
timeline, if there is a prediction. docs/planning.md lists the keys.

The third step is recorded by torch.profiler, too, on each rank of the first pipeline: ``trace-rank0.json`` is a Chrome trace, in which
actions of the schedule, collectives and the optimizer's parts are labelled (comm/label.py).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.step_clock import StepClock
from lightning_holmes.plan.measured import RankStep, make_measured_timeline, seconds_by_kind
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.timeline import Timeline
from lightning_holmes.plan.timeline_plot import save_timeline_plot
from lightning_holmes.torch_private import is_profiling, profiling_all_threads

_TRACED = 2  # the step that is traced, counted from 0; the profiler makes it slower
_WARM_UP = _TRACED + 1  # first steps that are left out if enough others are recorded


class TimelineMonitor(pl.Callback):
    """Records the timeline of steps; needs HolmesStrategy.

    Args:
        every_n_steps: also write after every this many batches; None: at the end of fit only.
        file: name of the JSON file in the run's folder (the logger's, else the trainer's ``default_root_dir``); the
            picture is written next to it.
        draw: whether to make a picture.
    """

    def __init__(self, every_n_steps: int | None = None, file: str = "timeline.json", draw: bool = True) -> None:
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or every_n_steps < 1):
            raise ConfigurationError(
                f"every_n_steps={every_n_steps!r} is not allowed; write a whole number, at least 1"
            )
        if Path(file).suffix != ".json":
            raise ConfigurationError(f"file={file!r}: the name must end in .json")
        self.every_n_steps = every_n_steps
        self.file = file
        self.draw = draw
        self._clock: StepClock | None = None
        self._steps = 0  # batches that have begun
        self._profiler: profile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        start = getattr(trainer.strategy, "start_monitoring", None)
        if start is None:
            raise ConfigurationError(
                f"TimelineMonitor notes what HolmesStrategy runs, but the strategy is {type(trainer.strategy).__name__}; "
                f'use strategy="holmes", or leave the callback out'
            )
        self._clock = start()
        self._steps = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps == _TRACED and not is_profiling():  # a profiler of the user shows the labels, too
            self._profiler = profile(experimental_config=profiling_all_threads())
            self._profiler.start()
        self._steps += 1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._clock is not None
        self._clock.end_batch()
        if self._steps == _TRACED + 1:
            self._write_trace(trainer)
        if self.every_n_steps is not None and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_steps == 0:
            self._clock.interrupt()
            self.write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._clock is not None
        self._clock.interrupt()
        self.write(trainer)
        trainer.strategy.stop_monitoring()  # type: ignore[attr-defined]
        self._clock = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._clock = None
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write_trace(self, trainer: pl.Trainer) -> None:
        """Write the trace of the step that was just done, on the ranks of the first pipeline; all ranks must call."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # read on all ranks: log_dir is a collective
        if self._profiler is None:
            return
        self._profiler.stop()
        plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
        if trainer.global_rank in plan.placement.pipeline_group(0, 0):
            folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(folder / f"trace-rank{trainer.global_rank}.json"))
        self._profiler = None

    def write(self, trainer: pl.Trainer) -> None:
        """Gather the records of all ranks and write the files on rank 0; all ranks must call."""
        assert self._clock is not None
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # read on all ranks: log_dir is a collective
        found = _gather(self._clock.steps())
        if found is None:
            pl.utilities.rank_zero_warn(
                "TimelineMonitor: no step was noted to its end, so that there is no timeline to write"
            )
            return
        if not trainer.is_global_zero:
            return
        number, count, steps = found
        plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
        prediction = getattr(trainer.strategy, "prediction", None)
        predicted = None if prediction is None else prediction.timeline
        data = timeline_data(plan, steps, predicted)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file
        data |= {"step": number, "steps_noted": count}
        path.write_text(json.dumps(data, allow_nan=False), encoding="utf-8")
        if self.draw:
            _draw(data, path.with_suffix(".png"), title=f"step {number} of {type(trainer.lightning_module).__name__}")


def make_monitor(monitor: bool | int) -> TimelineMonitor | None:
    """Make the callback for the strategy's argument ``monitor``; None if it is False."""
    if isinstance(monitor, bool):
        return TimelineMonitor() if monitor else None
    if not isinstance(monitor, int) or monitor < 1:
        raise ConfigurationError(f"monitor={monitor!r} is not allowed; write True, False, or every how many steps")
    return TimelineMonitor(every_n_steps=monitor)


def timeline_data(plan: Plan, steps: Sequence[RankStep], predicted: Timeline | None) -> dict[str, Any]:
    """Make the contents of the JSON file from one step of every global rank; docs/planning.md documents the keys."""
    replicas = []
    for replica in range(plan.data_parallel_size):
        for part in range(plan.tensor_parallel_size):
            ranks = plan.placement.pipeline_group(replica, part)
            timeline = make_measured_timeline([steps[rank] for rank in ranks])
            replicas.append({"ranks": list(ranks), "timeline": timeline.to_data()})
    return {
        "step_s": max(step.seconds for step in steps),
        "seconds_by_kind": [seconds_by_kind(step) for step in steps],
        "replicas": replicas,
        "predicted": None if predicted is None else predicted.to_data(),
    }


def _gather(mine: dict[int, RankStep]) -> tuple[int, int, list[RankStep]] | None:
    """Return (number of the step of median duration, number of recorded steps that were compared, that step on every
    rank), or None if no step was recorded by all ranks; all ranks must call."""
    seconds = {number: step.seconds for number, step in mine.items()}
    everyone: list[Any] = all_gather_values(seconds)
    common = sorted(set(everyone[0]).intersection(*everyone[1:]))
    if len(common) > 2 * _WARM_UP:
        common = common[_WARM_UP:]
    if not common:
        return None
    longest = {number: max(of_rank[number] for of_rank in everyone) for number in common}
    middle = statistics.median_low(longest.values())
    number = next(number for number in common if longest[number] == middle)
    return number, len(common), all_gather_values(mine[number])


def _draw(data: dict[str, Any], path: Path, *, title: str) -> None:
    timelines = [] if data["predicted"] is None else [Timeline.from_data(data["predicted"])]
    ranks: list[list[int]] = [[] for _ in timelines]
    timelines += [Timeline.from_data(replica["timeline"]) for replica in data["replicas"][:4]]
    ranks += [replica["ranks"] for replica in data["replicas"][:4]]
    try:
        save_timeline_plot(timelines, path, title=title, ranks=ranks)
    except ConfigurationError as error:  # for example, matplotlib is missing; the JSON has the figures
        pl.utilities.rank_zero_warn(f"TimelineMonitor draws nothing: {error}")
