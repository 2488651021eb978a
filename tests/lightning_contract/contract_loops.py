"""Loops: how many batches, epochs and validations run, what ends them, and what the Trainer reports meanwhile."""

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import state_of
from contract import TWO, Run, each, refused, whole_batches
from contract_models import Calls, Net, batches, same
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus


@each(
    one_epoch=({}, 1, 4),
    three_epochs=({"max_epochs": 3}, 3, 12),
    steps_within_an_epoch=({"max_epochs": -1, "max_steps": 3}, 1, 3),
    steps_over_epochs=({"max_epochs": -1, "max_steps": 6}, 2, 6),
    steps_that_end_an_epoch=({"max_epochs": -1, "max_steps": 8}, 2, 8),
    epochs_before_steps=({"max_epochs": 1, "max_steps": 100}, 1, 4),
    no_epoch=({"max_epochs": 0}, 0, 0),
    no_step=({"max_steps": 0}, 0, 0),
    limited_by_number=({"limit_train_batches": 3}, 1, 3),
    limited_by_share=({"limit_train_batches": 0.5}, 1, 2),
    limited_to_nothing=({"limit_train_batches": 0}, 0, 0),
    no_time=({"max_time": timedelta(0)}, 0, 0),
)
def case_fit_ends_at_its_limit(run: Run, value: Any):
    options, epochs, steps = value
    module = Net()
    before = state_of(module)
    trainer = run.fit(module, **options)
    assert (trainer.current_epoch, trainer.global_step) == (epochs, steps)
    assert same(state_of(module), before) == (steps == 0)
    assert trainer.state.finished
    return state_of(module)


@each(
    every_epoch=({"max_epochs": 3}, 3, 6),
    every_second_epoch=({"max_epochs": 4, "check_val_every_n_epoch": 2}, 2, 4),
    twice_an_epoch=({"max_epochs": 2, "val_check_interval": 0.5}, 4, 8),
    every_batch=({"val_check_interval": 1}, 4, 8),
    every_third_batch=({"max_epochs": 2, "val_check_interval": 3}, 2, 4),
    over_epochs=({"max_epochs": 3, "val_check_interval": 6, "check_val_every_n_epoch": None}, 2, 4),
    limited_by_number=({"limit_val_batches": 1}, 1, 1),
    limited_by_share=({"limit_val_batches": 0.5}, 1, 1),
    switched_off=({"limit_val_batches": 0}, 0, 0),
    sane_first=({"num_sanity_val_steps": 1}, 2, 3),
    wholly_sane_first=({"num_sanity_val_steps": -1}, 2, 4),
)
def case_validation_runs_as_often_as_asked(run: Run, value: Any):
    options, epochs, steps = value
    calls = Calls("on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end")
    module = Net()
    run.fit(module, batches(), batches(2), callbacks=[calls], **options)
    assert calls.count("on_validation_epoch_start") == calls.count("on_validation_epoch_end") == epochs
    assert calls.count("on_validation_batch_end") == steps
    return state_of(module)


def case_the_sanity_check_says_so_and_logs_nothing(run: Run):
    calls = Calls(
        "on_sanity_check_start",
        "on_validation_batch_end",
        "on_sanity_check_end",
        look=lambda trainer, module: (trainer.sanity_checking, trainer.global_step),
    )
    trainer = run.fit(Net(), batches(), batches(2), callbacks=[calls], num_sanity_val_steps=2)
    assert calls.names[:4] == ["on_sanity_check_start", *["on_validation_batch_end"] * 2, "on_sanity_check_end"]
    assert calls.seen[:3] == [(True, 0)] * 3
    assert calls.seen[-1] == (False, 4)
    assert trainer.callback_metrics.keys() == {"loss", "val_loss"}


class Stops(pl.Callback):
    """Sets ``should_stop`` in a hook once ``steps`` steps are done."""

    def __init__(self, hook: str, steps: int) -> None:
        def stop(trainer: Any, *rest: Any, **more: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step >= steps

        setattr(self, hook, stop)


@each(
    after_a_batch=("on_train_batch_end", 2, {}, 2),
    after_an_epoch=("on_train_epoch_end", 1, {}, 4),
    after_a_validation=("on_validation_end", 1, {}, 4),
    no_sooner_than_min_epochs=("on_train_batch_end", 2, {"min_epochs": 2}, 8),
    no_sooner_than_min_steps=("on_train_batch_end", 2, {"min_steps": 5}, 5),
    no_sooner_than_either=("on_train_batch_end", 2, {"min_steps": 3, "min_epochs": 1}, 4),
)
def case_should_stop_ends_a_fit(run: Run, value: Any):
    hook, after, options, steps = value
    module = Net()
    trainer = run.fit(module, batches(), batches(2), callbacks=[Stops(hook, after)], max_epochs=3, **options)
    assert trainer.global_step == steps
    assert trainer.state.finished
    return state_of(module)


def case_a_batch_start_hook_may_end_the_epoch(run: Run):
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 else None

    calls = Calls("on_train_batch_end", "on_train_epoch_end")
    module = Skips()
    trainer = run.fit(module, callbacks=[calls], max_epochs=2)
    assert trainer.global_step == 4 and trainer.current_epoch == 2
    assert calls.names == (["on_train_batch_end"] * 2 + ["on_train_epoch_end"]) * 2
    return state_of(module)


@refused("training_step", TWO)
@whole_batches
def case_a_step_may_skip_its_batch(run: Run):
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, calls = Skips(), Calls("on_train_batch_end", "on_before_backward")
    trainer = run.fit(module, callbacks=[calls])
    assert calls.count("on_train_batch_end") == 4
    assert calls.count("on_before_backward") == 3
    assert trainer.global_step == 4
    return state_of(module)


def case_a_step_may_return_a_dict(run: Run):
    class WithDict(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "twice": 2 * loss.detach()}

    found: list[Any] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert not outputs["loss"].requires_grad
            found.append((float(outputs["loss"]), float(outputs["twice"])))

    run.fit(WithDict(), callbacks=[Reads()])
    assert len(found) == 4
    assert all(twice == pytest.approx(2 * loss) for loss, twice in found)
    return found


@each(
    fit=("fit", TrainerFn.FITTING, "on_train_batch_start", RunningStage.TRAINING),
    validation_in_fit=("fit", TrainerFn.FITTING, "on_validation_batch_start", RunningStage.VALIDATING),
    validate=("validate", TrainerFn.VALIDATING, "on_validation_batch_start", RunningStage.VALIDATING),
    test=("test", TrainerFn.TESTING, "on_test_batch_start", RunningStage.TESTING),
    predict=("predict", TrainerFn.PREDICTING, "on_predict_batch_start", RunningStage.PREDICTING),
)
def case_the_state_says_what_runs(run: Run, value: Any):
    entry, function, hook, stage = value
    calls = Calls(hook, look=lambda trainer, module: (trainer.state.fn, trainer.state.stage, trainer.state.status))
    trainer = run.trainer(callbacks=[calls])
    loaders = (batches(1), batches(1)) if entry == "fit" else (batches(1),)
    getattr(trainer, entry)(Net(), *loaders)
    assert calls.seen == [(function, stage, TrainerStatus.RUNNING)]
    assert trainer.state.status == TrainerStatus.FINISHED
    assert trainer.state.stage is None


@each(
    training=("fit", "on_train_batch_start", True, True),
    validating_in_fit=("fit", "on_validation_batch_start", False, False),
    validating=("validate", "on_validation_batch_start", False, False),
    testing=("test", "on_test_batch_start", False, False),
    predicting=("predict", "on_predict_batch_start", False, False),
)
def case_modes_are_those_of_the_stage(run: Run, value: Any):
    entry, hook, trains, with_gradients = value
    calls = Calls(hook, look=lambda trainer, module: (module.training, torch.is_grad_enabled()))
    module = Net()
    loaders = (batches(1), batches(1)) if entry == "fit" else (batches(1),)
    getattr(run.trainer(callbacks=[calls]), entry)(module, *loaders)
    assert calls.seen == [(trains, with_gradients)]
    assert module.training


@each(by_default=(None, True), switched_off=(False, False))
def case_evaluation_is_in_inference_mode(run: Run, value: Any):
    option, inference = value
    options = {} if option is None else {"inference_mode": option}
    calls = Calls(
        "on_validation_batch_start", look=lambda *_: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    )
    run.trainer(callbacks=[calls], **options).validate(Net(), batches(1), verbose=False)
    # Lightning uses no_grad where processes communicate by gloo
    assert calls.seen == [(inference and run.layout != TWO, False)]


def case_submodules_in_evaluation_mode_stay_so(run: Run):
    """A submodule that the user has put into evaluation mode is still in it after a validation."""
    module = Net()
    module.layers[1].eval()
    calls = Calls(
        "on_train_batch_start",
        "on_validation_batch_start",
        look=lambda trainer, module: (module.training, *(layer.training for layer in module.layers)),
    )
    run.fit(module, batches(), batches(2), callbacks=[calls], max_epochs=2, limit_train_batches=1, limit_val_batches=1)
    assert calls.seen == [(True, True, False), (False, False, False)] * 2


@each(validate="limit_val_batches", test="limit_test_batches", predict="limit_predict_batches")
def case_evaluation_is_limited(run: Run, option: str):
    entry = {"limit_val_batches": "validate", "limit_test_batches": "test", "limit_predict_batches": "predict"}[option]
    hook = f"on_{'validation' if entry == 'validate' else entry}_batch_end"
    calls = Calls(hook)
    for limit in (3, 0.25, 0):
        getattr(run.trainer(callbacks=[calls], **{option: limit}), entry)(Net(), batches(4))
        calls.names.append("next")
    assert calls.names == [hook] * 3 + ["next", hook, "next", "next"]


def case_what_raises_in_a_hook_comes_out_and_is_told_to_callbacks(run: Run):
    class Fails(Net):
        def on_train_epoch_start(self) -> None:
            raise RuntimeError("planned")

    told: list[Any] = []

    class Listens(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: Any) -> None:
            told.append(str(exception))

    trainer = run.trainer(callbacks=[Listens()])
    with pytest.raises(RuntimeError, match="planned"):
        trainer.fit(Fails(), batches())
    assert told == ["planned"]
    assert trainer.interrupted and trainer.state.status == TrainerStatus.INTERRUPTED


def case_what_raises_in_a_step_comes_out(run: Run):
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 2:
                raise ValueError("planned")
            return super().training_step(batch, batch_idx)

    module = Fails()
    trainer = run.trainer()
    with pytest.raises(Exception, match="planned"):
        trainer.fit(module, batches())
    assert trainer.interrupted and trainer.global_step == 2


@each(
    epochs=({"max_epochs": 3}, 12),
    steps=({"max_epochs": -1, "max_steps": 7}, 7),
    accumulated=({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
    endless=({"max_epochs": -1, "limit_train_batches": 2}, float("inf")),
)
def case_the_number_of_steps_is_estimated(run: Run, value: Any):
    options, steps = value

    class Asks(Net):
        def configure_optimizers(self) -> Any:
            self.estimated = self.trainer.estimated_stepping_batches
            self.trainer.should_stop = True
            return super().configure_optimizers()

    module = Asks()
    run.fit(module, **options)
    assert module.estimated == steps


@each(validate="validate", test="test", predict="predict")
def case_evaluation_takes_the_module_that_was_fitted(run: Run, entry: str):
    module = Net()
    trainer = run.fit(module, enable_checkpointing=True)
    assert getattr(trainer, entry)(dataloaders=batches(1)) is not None
    assert trainer.lightning_module is module
