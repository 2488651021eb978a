"""Profilers: which actions they see, and where they write."""

from pathlib import Path
from typing import Any

import pytest
from contract import Run, each
from contract_models import Net, batches
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException


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


@each(
    nothing=(None, PassThroughProfiler),
    simple=("simple", SimpleProfiler),
    advanced=("advanced", AdvancedProfiler),
    pytorch=("pytorch", PyTorchProfiler),
)
def case_profilers_have_names(run: Run, value: Any):
    word, kind = value
    assert type(run.trainer(profiler=word).profiler) is kind


def case_an_unknown_name_is_refused(run: Run):
    with pytest.raises(MisconfigurationException, match="profiler"):
        run.trainer(profiler="stopwatch")


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


def case_the_user_may_profile_an_action(run: Run):
    class Acts(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            with self.trainer.profiler.profile("mine"):
                pass

    profiler = SimpleProfiler()
    run.fit(Acts(), batches(3), profiler=profiler)
    assert len(profiler.recorded_durations["mine"]) == 3


@each(validate="validate", test="test", predict="predict")
def case_actions_of_an_evaluation_are_timed(run: Run, entry: str):
    profiler = SimpleProfiler()
    getattr(run.trainer(profiler=profiler), entry)(Net(), batches(2))
    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[entry]
    assert sum(len(times) for name, times in profiler.recorded_durations.items() if name.endswith(step)) == 2


def case_an_action_twice_is_refused(run: Run):
    profiler = SimpleProfiler()
    profiler.start("action")
    with pytest.raises(ValueError, match="action"):
        profiler.start("action")
    with pytest.raises(ValueError, match="other"):
        profiler.stop("other")
