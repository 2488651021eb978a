"""Accumulation of gradients: when the optimizer steps, and on what."""

from typing import Any

from comparing import state_of
from contract import Run, each
from contract_models import Calls, Net, batches, stream
from lightning.pytorch.callbacks import GradientAccumulationScheduler

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
    return state_of(module)


def case_without_a_length_the_last_batch_steps_too(run: Run):
    module = Net()
    trainer = run.fit(module, stream(3), accumulate_grad_batches=2)
    assert trainer.global_step == 2
    return state_of(module)


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
    return state_of(module)


def case_validation_waits_for_batches_not_for_steps(run: Run):
    calls = Calls("on_validation_start", look=lambda trainer, module: trainer.global_step)
    run.fit(Net(), batches(), batches(2), callbacks=[calls], accumulate_grad_batches=2, val_check_interval=2)
    assert calls.seen == [1, 2]
