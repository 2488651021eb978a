"""Lightning's own callbacks and profilers, except checkpoints: what they record, log, draw and change."""

import contextlib
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import Run, each
from contract_models import Lines, Net, batches
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch.optim.lr_scheduler import ExponentialLR


class Counts(ProgressBar):
    """Draws nothing; records its progress and the total."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[Any] = []
        self.validation: list[Any] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append((batch_idx + 1, self.total_train_batches))

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validation.append((batch_idx + 1, trainer.sanity_checking))


class Shows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("shown", loss, prog_bar=True)
        return loss


def case_a_bar_is_told_of_each_batch(run: Run):
    bar = Counts()
    run.fit(Net(), batches(3), batches(2), callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1)
    assert bar.train == [(1, 3), (2, 3), (3, 3)]
    assert bar.validation == [(1, True), (1, False), (2, False)]


@each(tqdm=TQDMProgressBar, rich=RichProgressBar)
def case_a_bar_is_drawn_by_the_first_process(run: Run, kind: Any):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        run.fit(Shows(), batches(2), batches(1), callbacks=[kind()], enable_progress_bar=True, num_sanity_val_steps=1)
    printed = out.getvalue() + err.getvalue()
    assert ("shown" in printed and "2/2" in printed) == run.is_first


@each(validate="validate", test="test", predict="predict")
def case_bars_of_evaluations_reach_their_end(run: Run, entry: str):
    bar = TQDMProgressBar()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        getattr(run.trainer(callbacks=[bar], enable_progress_bar=True), entry)(Net(), batches(3))
        drawn = {"validate": "val", "test": "test", "predict": "predict"}[entry]
        assert getattr(bar, f"{drawn}_progress_bar").total == 3
        assert getattr(bar, f"{drawn}_progress_bar").n == 3 or not run.is_first


def case_actions_of_a_fit_are_timed(run: Run):
    profiler = SimpleProfiler()
    run.fit(Net(), batches(3), batches(1), profiler=profiler)
    seen = {name: len(times) for name, times in profiler.recorded_durations.items()}
    assert seen["run_training_batch"] == 3 and seen["run_training_epoch"] == 1
    assert seen["[LightningModule]Net.optimizer_step"] == 3
    strategies = [name for name in seen if name.startswith("[Strategy]")]
    assert sum(seen[name] for name in strategies if name.endswith(".training_step")) == 3
    assert sum(seen[name] for name in strategies if name.endswith(".validation_step")) == 1
    assert not profiler.current_actions


@each(simple=SimpleProfiler, advanced=AdvancedProfiler)
def case_a_report_is_written_to_a_file(run: Run, kind: Any):
    run.fit(Net(), batches(1), profiler=kind(dirpath=run.folder, filename="report"))
    names = run.files("fit-report*.txt")
    assert "fit-report.txt" in names or "fit-report-0.txt" in names
    assert "training_step" in Path(run.folder, names[0]).read_text()


def case_a_trace_is_written(run: Run):
    profiler = PyTorchProfiler(dirpath=run.folder, filename="trace", export_to_chrome=True)
    run.fit(Net(), batches(2), profiler=profiler, limit_val_batches=0)
    assert run.files("fit-trace*.txt")


class Decays(Net):
    """Halves its learning rate after each epoch or step."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": self.interval}]


@each(
    epochs=("epoch", {}, [0.1, 0.1, 0.05, 0.05]),
    steps=("step", {}, [0.1, 0.05, 0.025, 0.0125]),
    epochs_alone=("epoch", {"logging_interval": "epoch"}, [0.1, 0.05]),
    steps_alone=("step", {"logging_interval": "step"}, [0.1, 0.05, 0.025, 0.0125]),
)
def case_rates_are_logged(run: Run, value: Any):
    interval, options, rates = value
    lines, monitor = Lines(), LearningRateMonitor(**options)
    run.fit(Decays(interval), batches(2), logger=lines, callbacks=[monitor], max_epochs=2)
    found = lines.column("lr-SGD")
    if interval == "epoch" and not options:
        found = found * 2 if len(found) == 2 else found
        found.sort(reverse=True)
    assert found == pytest.approx(rates)
    return lines.lines


@each(timedelta=timedelta(seconds=0), dict={"seconds": 0}, text="00:00:00:00")
def case_a_timer_ends_a_fit(run: Run, duration: Any):
    trainer = run.fit(Net(), callbacks=[Timer(duration)], max_epochs=-1)
    assert trainer.global_step <= 1
    assert trainer.state.finished


def case_a_summary_counts_the_whole_module(run: Run):
    shown: list[Any] = []

    class Shows(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total: int, trainable: int, size: float, modes: Any, **options: Any) -> None:
            shown.append((summary_data, total, trainable))

    module = Net()
    module.layers[0].requires_grad_(False)
    run.fit(module, callbacks=[Shows(max_depth=2)], enable_model_summary=True)
    if run.is_first:
        ((rows, total, trainable),) = shown
        assert (total, trainable) == (40, 20)
        assert dict(rows)["Name"] == ["layers", "layers.0", "layers.1"]
    else:
        assert not shown


@each(of_depth_one=1, of_depth_zero=0)
def case_a_summary_is_printed_once(run: Run, depth: int):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.fit(Net(), callbacks=[RichModelSummary(max_depth=depth)], enable_model_summary=True)
    assert printed.getvalue().count("ModuleList") == (depth if run.is_first else 0)


def case_throughput_is_logged(run: Run):
    lines = Lines()
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=3)
    run.fit(Net(), batches(4), callbacks=[monitor], logger=lines)
    assert lines.column("train/batches") == ([1, 2, 3, 4] if run.is_first else [])
    assert lines.column("train/samples") == ([2, 4, 6, 8] if run.is_first else [])
