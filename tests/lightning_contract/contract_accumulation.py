"""Accumulation of gradients: when the optimizer steps, and on what."""

from typing import Any

import pytest
import torch
from contract import Run, each
from contract_models import Calls, Lines, Net, Rows, batches, stream, weights
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

STEPS = ("on_before_zero_grad", "on_before_backward", "on_before_optimizer_step")


@each(
    every_batch=(1, 4, 4),
    every_second=(2, 4, 2),
    with_a_rest=(3, 4, 2),
    the_whole_epoch=(4, 4, 1),
    more_than_the_epoch=(9, 4, 1),
)
def case_the_optimizer_steps_each_so_many_batches_and_at_the_end(run: Run, value: Any):
    every, count, steps = value
    calls = Calls(*STEPS)
    module = Net()
    trainer = run.fit(module, batches(count), callbacks=[calls], accumulate_grad_batches=every)
    assert trainer.global_step == steps
    assert calls.count("on_before_optimizer_step") == calls.count("on_before_zero_grad") == steps
    assert calls.count("on_before_backward") == count
    return weights(module)


def case_accumulating_is_the_mean_of_the_batches(run: Run):
    """Two batches of two rows give the step of one batch of four."""
    small, large = Net(), Net()
    large.load_state_dict(small.state_dict())
    run.fit(small, batches(4), accumulate_grad_batches=2)
    run.fit(large, DataLoader(Rows(8), batch_size=4))
    for name, value in weights(large).items():
        torch.testing.assert_close(weights(small)[name], value)


def case_each_epoch_begins_anew(run: Run):
    calls = Calls("on_before_optimizer_step", "on_train_epoch_end")
    run.fit(Net(), batches(3), callbacks=[calls], accumulate_grad_batches=2, max_epochs=2)
    assert calls.names == (["on_before_optimizer_step"] * 2 + ["on_train_epoch_end"]) * 2


def case_without_a_length_the_last_batch_steps_too(run: Run):
    module = Net()
    trainer = run.fit(module, stream(3), accumulate_grad_batches=2)
    assert trainer.global_step == 2
    return weights(module)


@each(by_epoch=({0: 1, 1: 2, 2: 4}, [4, 2, 1]), from_a_later_epoch=({2: 2}, [4, 4, 2]))
def case_a_scheduler_changes_the_number(run: Run, value: Any):
    scheduling, steps = value
    calls = Calls(
        "on_train_epoch_end", look=lambda trainer, module: (trainer.global_step, trainer.accumulate_grad_batches)
    )
    module = Net()
    run.fit(module, callbacks=[GradientAccumulationScheduler(scheduling), calls], max_epochs=3)
    done = [step for step, _ in calls.seen]
    assert [b - a for a, b in zip([0, *done], done, strict=False)] == steps
    return weights(module)


def case_a_scheduler_beside_the_argument_is_refused(run: Run):
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        run.fit(Net(), callbacks=[GradientAccumulationScheduler({0: 2})], accumulate_grad_batches=2)


def case_validation_waits_for_batches_not_for_steps(run: Run):
    calls = Calls("on_validation_start", look=lambda trainer, module: trainer.global_step)
    run.fit(Net(), batches(), batches(2), callbacks=[calls], accumulate_grad_batches=2, val_check_interval=2)
    assert calls.seen == [1, 2]


def case_schedulers_of_steps_follow_the_optimizer(run: Run):
    class Decays(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Decays()
    trainer = run.fit(module, accumulate_grad_batches=2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
    return weights(module)


def case_logs_are_numbered_by_steps_of_the_optimizer(run: Run):
    lines = Lines()
    run.fit(Net(), batches(4), logger=lines, accumulate_grad_batches=2)
    assert {step for step, _ in lines.lines} <= {0, 1}
    return lines.lines
