"""Optimizers and learning rates: the forms of ``configure_optimizers``, when schedulers step, and the hooks around a step."""

from typing import Any

import pytest
import torch
from comparing import state_of
from contract import Run, each, refused
from contract_models import Calls, Net, batches, stream
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR


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


class Configured(Net):
    """A module whose optimizers a given function makes."""

    def __init__(self, configure: Any) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def halved(optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.5)


def with_scheduler(form: Any) -> Any:
    """Return a configure_optimizers that returns ``form(optimizer, scheduler)``."""

    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        return form(optimizer, halved(optimizer))

    return configure


@each(
    an_optimizer=(sgd, 0.1),
    a_list=(lambda m: [sgd(m)], 0.1),
    a_tuple=(lambda m: (sgd(m),), 0.1),
    a_dict=(lambda m: {"optimizer": sgd(m)}, 0.1),
    lists_of_both=(with_scheduler(lambda o, s: ([o], [s])), 0.025),
    a_dict_with_scheduler=(with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": s}), 0.025),
    a_dict_with_its_settings=(
        with_scheduler(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}),
        0.1 * 0.5**8,
    ),
    each_second_epoch=(with_scheduler(lambda o, s: ([o], [{"scheduler": s, "frequency": 2}])), 0.05),
    each_third_step=(with_scheduler(lambda o, s: ([o], [{"scheduler": s, "interval": "step", "frequency": 3}])), 0.025),
    two_schedulers=(with_scheduler(lambda o, s: ([o], [s, halved(o)])), 0.1 * 0.5**4),
    one_cycle=(
        lambda m: (lambda o: ([o], [{"scheduler": OneCycleLR(o, 0.2, total_steps=9), "interval": "step"}]))(sgd(m)),
        None,
    ),
)
def case_configure_optimizers_may_return(run: Run, value: Any):
    configure, rate = value
    module = Configured(configure)
    trainer = run.fit(module, max_epochs=2)
    found = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate is None or found == pytest.approx(rate)
    return state_of(module), found


def case_without_optimizer_nothing_is_trained(run: Run):
    module = Configured(lambda _: None)
    before = state_of(module)
    with run.warning("returned `None`"):
        trainer = run.fit(module)
    assert all(torch.equal(value, before[name]) for name, value in state_of(module).items())
    assert trainer.state.finished


class Asks(Net):
    """Asks for its optimizer and schedulers in hooks."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        return [optimizer], [halved(optimizer)]

    def on_train_start(self) -> None:
        self.asked = [self.optimizers(use_pl_optimizer=False), self.lr_schedulers()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates = [*getattr(self, "rates", []), self.lr_schedulers().get_last_lr()[0]]


def case_the_module_reaches_its_optimizer_and_scheduler(run: Run):
    module = Asks()
    trainer = run.fit(module, max_epochs=2)
    assert module.asked[0] is trainer.optimizers[0]
    assert isinstance(module.asked[1], ExponentialLR)
    assert trainer.lr_scheduler_configs[0].scheduler is module.asked[1]
    assert module.rates == pytest.approx(([0.1] * 3 + [0.05]) + [0.05] * 3 + [0.025])


def case_steps_of_the_optimizer_go_through_its_hook(run: Run):
    class Warms(Net):
        given: Any = ()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.given = [*self.given, (epoch, batch_idx, type(optimizer).__name__)]
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + self.trainer.global_step)
            optimizer.step(closure=optimizer_closure)

    module = Warms()
    run.fit(module, max_epochs=2, limit_train_batches=2)
    assert [place[:2] for place in module.given] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    return state_of(module)


def case_gradients_are_emptied_by_hand(run: Run):
    class Empties(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad = None

    return run.weights_after(Empties())


@refused("optimizer_zero_grad of Keeps was not seen to empty the gradients before batch 0")
def case_gradients_are_kept_by_their_hook(run: Run):
    class Keeps(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            pass

    return run.weights_after(Keeps())


@refused("parameters were changed between the forward and the backward of a step, where Clamps.on_before_")
@each(zero="on_before_zero_grad", backward="on_before_backward")
def case_parameters_that_are_changed_before_the_backward(run: Run, hook: str):
    class Clamps(Net):
        def clamp(self, *_: Any) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.1, 0.1)

    setattr(Clamps, hook, Clamps.clamp)
    return run.weights_after(Clamps())


@refused("SGD was given a parameter group between batches of one step")
def case_a_group_that_is_added_between_batches_of_a_step(run: Run):
    class Adds(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers[0].add_param_group({"params": list(self.layers[1].parameters())})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layers[0].parameters(), lr=0.1)

    return run.weights_after(Adds(), accumulate_grad_batches=2)


@refused("this SGD was put into trainer.optimizers")
def case_another_optimizer_in_the_second_epoch(run: Run):
    class Swaps(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers = [sgd(self)]

    return run.weights_after(Swaps(), max_epochs=2)


class Scaled(torch.optim.Optimizer):
    """The simplest optimizer that a user may write."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["lr"] * parameter.grad
        return loss


def case_an_optimizer_of_the_user_s_is_given_a_closure(run: Run):
    module = Configured(lambda m: Scaled(m.parameters(), 0.1))
    trainer = run.fit(module)
    assert trainer.global_step == 4
    return state_of(module)


def case_hooks_of_the_optimizer_are_called(run: Run):
    count: list[str] = []

    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        optimizer.register_step_pre_hook(lambda *_: count.append("before"))
        optimizer.register_step_post_hook(lambda *_: count.append("after"))
        return optimizer

    run.fit(Configured(configure), limit_train_batches=2)
    assert count == ["before", "after"] * 2


def case_the_hook_that_clips_is_given_the_trainer_s_values(run: Run):
    class Notes(Net):
        given: Any = None

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.given = (gradient_clip_val, str(gradient_clip_algorithm.value))

    module = Notes()
    run.fit(module, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert module.given == (0.5, "value")
    return state_of(module)
