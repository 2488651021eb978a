"""Profilers: which actions they see, and where they write."""

from pathlib import Path
from typing import Any

from contract import Run, each
from contract_models import Net, batches
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler


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
