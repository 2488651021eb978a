"""Lightning's own callbacks, except checkpoints, progress bars and early stopping: what they record, log and change."""

import contextlib
import io
from datetime import timedelta
from typing import Any

import pytest
import torch
from contract import Run, each
from contract_models import Lines, Net, batches
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    ThroughputMonitor,
    Timer,
)
from torch.optim.lr_scheduler import ExponentialLR


class Decays(Net):
    """Halves its learning rate after each epoch or step."""

    def __init__(self, interval: str = "epoch", name: Any = None) -> None:
        super().__init__()
        self.interval, self.named = interval, name

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [
            {"scheduler": ExponentialLR(optimizer, 0.5), "interval": self.interval, "name": self.named}
        ]


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
