"""``self.log``: the names under which values arrive and where, how they are reduced, and from which hooks they may be logged."""

import contextlib
import io
from typing import Any

import pytest
import torch
from contract import Run, each, whole_batches
from contract_models import Lines, Net, batches
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class Logs(Net):
    """Logs "value", the mean of a batch, with the given options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("value", batch.mean(), **self.options)
        return loss


@whole_batches
@each(mean="mean", sum="sum", max="max", min="min", torch_mean=torch.mean)
def case_values_of_an_epoch_are_reduced(run: Run, how: Any):
    trainer = run.fit(Logs(reduce_fx=how, on_step=False, on_epoch=True), batches(3))
    values = [float(batch.mean()) for batch in batches(3)]
    expected = {"sum": sum(values), "max": max(values), "min": min(values)}.get(how, sum(values) / 3)
    assert float(trainer.callback_metrics["value"]) == pytest.approx(expected, rel=1e-5)


def case_the_mean_of_an_epoch_weighs_batches_by_their_size(run: Run):
    class Sized(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("value", float(batch_idx), batch_size=[3, 1][batch_idx])

    results = run.trainer().validate(Sized(), batches(2), verbose=False)
    assert results[0]["value"] == pytest.approx(0.25)


@each(
    a_tensor=lambda: torch.tensor(2.0),
    a_number=lambda: 2,
    a_float=lambda: 2.0,
    a_tensor_of_one=lambda: torch.tensor([2.0]),
)
def case_takes(run: Run, make: Any):
    class Takes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", make())
            return super().training_step(batch, batch_idx)

    trainer = run.fit(Takes())
    assert float(trainer.callback_metrics["value"]) == 2.0


@each(
    a_word=lambda: "word", a_list=lambda: [1.0], a_dict=lambda: {"inner": 1.0}, a_tensor_of_many=lambda: torch.ones(3)
)
def case_refuses(run: Run, make: Any):
    class Takes(Net):
        def on_train_start(self) -> None:
            self.log("value", make())

    with pytest.raises((ValueError, TypeError, MisconfigurationException)) as caught:
        run.fit(Takes())
    return type(caught.value).__name__


HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"),
)


@each(**{hook: hook for hook in HOOKS})
def case_may_come_from(run: Run, hook: str):
    module, count = Net(), [0]

    def logs(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        module.log(hook, float(count[0]))

    setattr(module, hook, logs)
    trainer = run.fit(module, batches(2), batches(1))
    assert count[0] > 0
    return float(trainer.callback_metrics[hook]), count[0]


@each(every=(1, [0, 1, 2, 3]), every_second=(2, [1, 3]), never=(0, []))
def case_the_interval_of_steps_is_kept(run: Run, value: Any):
    interval, steps = value
    lines = Lines()
    run.fit(Net(), batches(4), logger=lines, log_every_n_steps=interval)
    assert [step for step, _ in lines.lines] == steps


def case_steps_of_an_evaluation_are_counted_from_zero(run: Run):
    class Steps(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", self.loss(batch), on_step=True, on_epoch=False)

    lines = Lines()
    run.trainer(logger=lines).validate(Steps(), batches(3), verbose=False)
    assert [step for step, _ in lines.lines] == [0, 1, 2]


def case_printing_is_for_the_first_process(run: Run):
    class Prints(Net):
        def on_train_start(self) -> None:
            self.print("hello")

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.fit(Prints(), batches(1))
    assert printed.getvalue().count("hello") == (1 if run.is_first else 0)
