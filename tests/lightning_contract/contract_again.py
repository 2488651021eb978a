"""A Trainer, a module or a process that is used more than once."""

from typing import Any

import pytest
from contract import Run, each
from contract_models import Calls, Lines, Net, batches, same, weights
from lightning.pytorch.callbacks import ModelCheckpoint


def case_a_second_fit_of_a_finished_trainer_trains_no_more(run: Run):
    module = Net()
    trainer = run.fit(module)
    before = weights(module)
    trainer.fit(module, batches(4))
    assert trainer.global_step == 4 and same(weights(module), before)


def case_more_epochs_go_on(run: Run):
    module = Net()
    trainer = run.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, batches(4), batches(2))
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    return weights(module)


def case_more_steps_go_on(run: Run):
    module = Net()
    trainer = run.fit(module, max_epochs=-1, max_steps=3)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, batches(4))
    assert trainer.global_step == 6
    return weights(module)


def case_another_module_goes_on_where_the_first_stopped(run: Run):
    first, second = Net(), Net()
    trainer = run.fit(first)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, batches(4))
    assert trainer.lightning_module is second and trainer.global_step == 8
    return weights(first), weights(second)


def case_another_trainer_begins_anew(run: Run):
    module = Net()
    run.fit(module)
    trainer = run.fit(module)
    assert trainer.global_step == 4
    return weights(module)


def case_a_module_is_free_after_a_fit(run: Run):
    """The module can run, and all its parameters are there, as leaves, with gradients enabled."""
    module = Net()
    run.fit(module)
    out = module(next(iter(batches(1))))
    out.sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in module.parameters())
    return out.detach()


@each(
    validate_and_fit=("validate", "fit"),
    fit_and_test=("fit", "test"),
    fit_and_predict=("fit", "predict"),
    test_and_predict=("test", "predict"),
    predict_and_validate=("predict", "validate"),
    test_fit_and_test=("test", "fit", "test"),
)
def case_calls_follow_each_other(run: Run, entries: tuple[str, ...]):
    module, trainer = Net(), run.trainer()
    results = []
    for entry in entries:
        loaders = (batches(2), batches(2)) if entry == "fit" else (batches(2),)
        results.append(getattr(trainer, entry)(module, *loaders))
        assert trainer.state.finished and trainer.state.fn == {"fit": "fit"}.get(entry, entry)
    return results, weights(module)


def case_what_is_validated_after_a_fit_is_what_it_has_logged(run: Run):
    module = Net()
    trainer = run.fit(module, batches(4), batches(2))
    logged = float(trainer.callback_metrics["val_loss"])
    assert trainer.validate(module, batches(2), verbose=False)[0]["val_loss"] == pytest.approx(logged, rel=1e-5)


def case_a_trainer_that_has_failed_fits_again(run: Run):
    class Fails(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise RuntimeError("planned")

    trainer = run.trainer()
    with pytest.raises(RuntimeError, match="planned"):
        trainer.fit(Fails(), batches(4))
    module = Net()
    trainer.fit(module, batches(4))
    assert trainer.state.finished
    return trainer.global_step, weights(module)


def case_hooks_come_with_each_fit(run: Run):
    calls = Calls("setup", "on_fit_start", "on_train_start", "on_fit_end", "teardown")
    trainer = run.fit(Net(), callbacks=[calls])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), batches(4))
    assert calls.names == ["setup", "on_fit_start", "on_train_start", "on_fit_end", "teardown"] * 2


def case_logs_and_checkpoints_go_on(run: Run):
    lines = Lines()
    checkpoint = ModelCheckpoint(run.folder / "kept", save_top_k=-1, filename="{step}")
    module = Net()
    trainer = run.fit(module, batches(2), callbacks=[checkpoint], logger=lines)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(2))
    assert [step for step, _ in lines.lines] == [0, 1, 2, 3]
    assert run.files("kept/*.ckpt") == ["kept/step=2.ckpt", "kept/step=4.ckpt"]


def case_loaders_may_change_between_fits(run: Run):
    module = Net()
    trainer = run.fit(module, batches(4))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(2))
    assert trainer.global_step == 6 and trainer.num_training_batches == 2


def case_a_module_inside_another_is_fitted_by_itself(run: Run):
    class Outer(Net):
        def __init__(self, inner: Net) -> None:
            super().__init__()
            del self.layers
            self.inner = inner

        def loss(self, batch: Any) -> Any:
            return self.inner.loss(batch)

    inner = Net()
    outer = Outer(inner)
    run.fit(inner)
    run.fit(outer)
    return weights(inner)
