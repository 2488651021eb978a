"""TimelineMonitor: what each rank did in a real step, written into the run's folder as a Chrome trace and as a picture.

    Trainer(strategy=HolmesStrategy(monitor=True))               # or monitor=100: also every 100 steps
    Trainer(strategy="holmes", callbacks=[TimelineMonitor(every_n_steps=100)])

torch.profiler records the third step on each rank of the first pipeline. ``trace-rank0.json`` and so on are Chrome traces, in which
actions of the schedule, waits, collectives and the optimizer's parts are labelled (comm/label.py). ``timeline.png`` shows the labels of all
these ranks below the predicted timeline, if there is a prediction. Other steps take no longer than without a monitor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.profiler import profile

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.plan.layer_cost import check_count
from lightning_holmes.plan.measured import make_measured_timeline, spans_of_trace
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.timeline import Span
from lightning_holmes.plan.timeline_plot import save_timeline_plot
from lightning_holmes.torch_private import is_profiling, profiling_all_threads

_TRACED = 2  # the step that is traced, counted from 0: the first ones set up


class TimelineMonitor(pl.Callback):
    """Records the timeline of a step; needs HolmesStrategy.

    Args:
        every_n_steps: also record every this many batches, and write the files anew, but no two batches in a row; None: the third step only.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = None if every_n_steps is None else check_count(every_n_steps, "every_n_steps")
        self._steps = 0  # batches that have begun
        self._records = False  # whether the latest of them is recorded
        self._profiler: profile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not hasattr(trainer.strategy, "prediction"):
            raise ConfigurationError(
                f"TimelineMonitor notes what HolmesStrategy runs, but the strategy is {type(trainer.strategy).__name__}; "
                f'use strategy="holmes", or leave the callback out'
            )
        self._steps, self._records = 0, False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        every, batches = self.every_n_steps, trainer.fit_loop.total_batch_idx + 1
        is_due = self._steps == _TRACED + 1 or (every is not None and batches % every == 0 and self._steps > _TRACED)
        # [Note: recordings keep apart] An operation of another thread that begins in one recording and ends in the next writes to freed memory
        # (seen with torch 2.13), and a receive for the next step is posted in this one: after a recording a step is left out.
        self._records = not self._records and is_due
        # a profiler of the user shows the labels, too
        if self._records and trainer.global_rank in _ranks(trainer) and not is_profiling():
            self._profiler = profile(experimental_config=profiling_all_threads())
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._records:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._steps <= _TRACED:
            pl.utilities.rank_zero_warn(
                f"TimelineMonitor: the fit had {self._steps} batches, and the timeline is that of batch {_TRACED + 1}"
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: pl.Trainer) -> None:
        """Write the trace of the step that was just done, and on rank 0 the picture of all ranks; all ranks must call."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # read on all ranks: log_dir is a collective
        mine: list[Span] = []
        if self._profiler is not None:
            self._profiler.stop()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"trace-rank{trainer.global_rank}.json"
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            mine = spans_of_trace(json.loads(path.read_text(encoding="utf-8")))
        everyone = all_gather_values(mine)
        ranks = _ranks(trainer)
        if trainer.is_global_zero and all(everyone[rank] for rank in ranks):
            prediction = getattr(trainer.strategy, "prediction", None)
            timelines = [] if prediction is None else [prediction.timeline]
            measured = make_measured_timeline([everyone[rank] for rank in ranks])
            title = f"step {trainer.fit_loop.total_batch_idx} of {type(trainer.lightning_module).__name__}"
            try:
                save_timeline_plot(
                    [*timelines, measured],
                    folder / "timeline.png",
                    title=title,
                    ranks=[*([()] * len(timelines)), ranks],
                )
            except ConfigurationError as error:  # for example, matplotlib is missing; the traces have the figures
                pl.utilities.rank_zero_warn(f"TimelineMonitor draws nothing: {error}")


def make_monitor(monitor: bool | int) -> TimelineMonitor | None:
    """Make the callback for the strategy's argument ``monitor``; None if it is False."""
    if isinstance(monitor, bool):
        return TimelineMonitor() if monitor else None
    if not isinstance(monitor, int) or monitor < 1:
        raise ConfigurationError(f"monitor={monitor!r} is not allowed; write True, False, or every how many steps")
    return TimelineMonitor(every_n_steps=monitor)


def _ranks(trainer: pl.Trainer) -> tuple[int, ...]:
    """The ranks of the first pipeline, which are recorded."""
    plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
    return plan.placement.pipeline_group(0, 0)
