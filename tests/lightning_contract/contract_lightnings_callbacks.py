"""Lightning's own callbacks, except checkpoints, progress bars and early stopping: what they record, log and change."""

import contextlib
import io
from datetime import timedelta
from typing import Any

import pytest
import torch
from contract import Run, each
from contract_models import Calls, Lines, Net, batches, weights
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
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


def case_a_timer_measures_the_stages(run: Run):
    timer = Timer()
    run.fit(Net(), batches(), batches(2), callbacks=[timer])
    assert timer.time_elapsed("train") > 0 and timer.time_elapsed("validate") > 0
    assert timer.time_elapsed("test") == 0
    assert timer.time_remaining() is None


@each(timedelta=timedelta(seconds=0), dict={"seconds": 0}, text="00:00:00:00")
def case_a_timer_ends_a_fit(run: Run, duration: Any):
    trainer = run.fit(Net(), callbacks=[Timer(duration)], max_epochs=-1)
    assert trainer.global_step <= 1
    assert trainer.state.finished


def case_a_timer_s_time_goes_through_checkpoints(run: Run):
    first, second = Timer(), Timer()
    trainer = run.fit(Net(), callbacks=[first])
    trainer.save_checkpoint(run.folder / "kept.ckpt")
    run.meet()
    run.fit(Net(), callbacks=[second], ckpt_path=run.folder / "kept.ckpt")
    assert second.time_elapsed("train") > 0


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


def case_device_statistics_are_logged(run: Run):
    lines = Lines()
    run.fit(Net(), callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=lines)
    names = {name for _, values in lines.lines for name in values}
    assert any(name.startswith("DeviceStatsMonitor.on_train_batch_start/cpu_percent") for name in names)


def case_throughput_is_logged(run: Run):
    lines = Lines()
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=3)
    run.fit(Net(), batches(4), callbacks=[monitor], logger=lines)
    assert lines.column("train/batches") == ([1, 2, 3, 4] if run.is_first else [])
    assert lines.column("train/samples") == ([2, 4, 6, 8] if run.is_first else [])


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layers[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[0], optimizer, lr=0.01)


class OnlyTrainable(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def case_finetuning_unfreezes(run: Run):
    module = OnlyTrainable()
    before = weights(module)
    run.fit(module, callbacks=[Unfreezes()])
    assert torch.equal(weights(module)["layers.0.weight"], before["layers.0.weight"])
    module = OnlyTrainable()
    trainer = run.fit(module, callbacks=[Unfreezes()], max_epochs=2)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]
    assert module.layers[0].weight.requires_grad
    return weights(module)


class WithBackbone(Net):
    """A module whose backbone is its first layer, and its head the second."""

    @property
    def backbone(self) -> Any:
        return self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[1].parameters(), lr=0.1)


def case_a_backbone_is_unfrozen(run: Run):
    module = WithBackbone()
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, initial_denom_lr=1.0)
    trainer = run.fit(module, callbacks=[callback], max_epochs=3)
    assert len(trainer.optimizers[0].param_groups) == 2
    return weights(module), [group["lr"] for group in trainer.optimizers[0].param_groups]


def case_weights_are_averaged_at_the_end(run: Run):
    module = Net()
    calls = Calls("on_train_epoch_end", look=lambda trainer, module: trainer.optimizers[0].param_groups[0]["lr"])
    run.fit(
        module, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1), calls], max_epochs=4
    )
    return weights(module), calls.seen


def case_a_moving_average_is_validated_and_kept(run: Run):
    module = Net()
    trainer = run.fit(module, batches(), batches(2), callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=2)
    return weights(module), float(trainer.callback_metrics["val_loss"])
