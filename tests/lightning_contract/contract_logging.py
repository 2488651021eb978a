"""``self.log``: the names under which values arrive and where, how they are reduced, and from which hooks they may be logged."""

import contextlib
import io
from typing import Any

import pytest
import torch
import torchmetrics
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


@each(
    by_default=({}, {"value"}),
    each_step=({"on_step": True, "on_epoch": False}, {"value"}),
    each_epoch=({"on_step": False, "on_epoch": True}, {"value"}),
    both=({"on_step": True, "on_epoch": True}, {"value_step", "value_epoch"}),
    neither_to_the_logger=({"logger": False}, set()),
)
def case_names_say_when(run: Run, value: Any):
    options, names = value
    lines = Lines()
    trainer = run.fit(Logs(**options), batches(3), logger=lines)
    found = {name for _, values in lines.lines for name in values} - {"epoch"}
    assert found == names
    assert "value" in trainer.callback_metrics
    both = options.get("on_step") and options.get("on_epoch")
    assert {"value_step", "value_epoch"} <= trainer.callback_metrics.keys() or not both
    return lines.lines, trainer.callback_metrics["value"]


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
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
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


def case_metrics_are_those_of_the_bar_the_logger_and_callbacks(run: Run):
    class Where(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("bar", loss, prog_bar=True, logger=False)
            self.log("logger", loss, prog_bar=False, logger=True)
            return loss

    trainer = run.fit(Where(), batches(2), logger=Lines())
    assert trainer.callback_metrics.keys() == {"bar", "logger"}
    assert trainer.progress_bar_metrics.keys() == {"bar"}
    assert trainer.logged_metrics.keys() == {"logger"}


def case_logged_values_are_detached_copies(run: Run):
    trainer = run.fit(Net())
    assert not trainer.callback_metrics["loss"].requires_grad


@each(every=(1, [0, 1, 2, 3]), every_second=(2, [1, 3]), never=(0, []))
def case_the_interval_of_steps_is_kept(run: Run, value: Any):
    interval, steps = value
    lines = Lines()
    run.fit(Net(), batches(4), logger=lines, log_every_n_steps=interval)
    assert [step for step, _ in lines.lines] == steps


def case_validation_is_logged_at_the_step_that_was_reached(run: Run):
    lines = Lines()
    run.fit(Net(), batches(4), batches(2), logger=lines, val_check_interval=2)
    assert [step for step, values in lines.lines if "val_loss" in values] == [1, 3]


def case_steps_of_an_evaluation_are_counted_from_zero(run: Run):
    class Steps(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", self.loss(batch), on_step=True, on_epoch=False)

    lines = Lines()
    run.trainer(logger=lines).validate(Steps(), batches(3), verbose=False)
    assert [step for step, _ in lines.lines] == [0, 1, 2]


def case_epochs_are_logged_beside(run: Run):
    lines = Lines()
    run.fit(Net(), batches(2), logger=lines, max_epochs=2)
    assert lines.column("epoch") == [0, 0, 1, 1]


class Metrics(Net):
    """Logs metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = torchmetrics.MeanMetric(), torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean(batch[:, 0])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.total.update(batch[:, 0])
        self.log("total", self.total)


def case_metric_objects_are_computed_and_reset(run: Run):
    module = Metrics()
    trainer = run.fit(module, batches(4), batches(2), max_epochs=2)
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(0.035)
    assert float(trainer.callback_metrics["total"]) == pytest.approx(0.06)
    assert module.mean.update_count == 0


def case_what_the_user_computes_at_the_end_of_an_epoch(run: Run):
    """The steps keep outputs, and the hook uses and then discards them."""

    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch)
            self.outputs.append(out)
            return out

        def on_validation_epoch_end(self) -> None:
            self.log("value", torch.cat(self.outputs).mean())
            self.log("count", float(len(torch.cat(self.outputs))))
            self.outputs.clear()

    results = run.trainer().validate(Keeps(), batches(3), verbose=False)
    assert results[0]["count"] == 6.0
    return results


def case_printing_is_for_the_first_process(run: Run):
    class Prints(Net):
        def on_train_start(self) -> None:
            self.print("hello")

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.fit(Prints(), batches(1))
    assert printed.getvalue().count("hello") == (1 if run.is_first else 0)
