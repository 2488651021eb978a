"""A Trainer, a module or a process that is used more than once."""

from typing import Any

import pytest
from comparing import state_of
from contract import Run, each
from contract_models import Net, batches, same


def case_a_second_fit_of_a_finished_trainer_trains_no_more(run: Run):
    module = Net()
    trainer = run.fit(module)
    before = state_of(module)
    trainer.fit(module, batches(4))
    assert trainer.global_step == 4 and same(state_of(module), before)


def case_more_steps_go_on(run: Run):
    module = Net()
    trainer = run.fit(module, max_epochs=-1, max_steps=3)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, batches(4))
    assert trainer.global_step == 6
    return state_of(module)


def case_another_module_goes_on_where_the_first_stopped(run: Run):
    first, second = Net(), Net()
    trainer = run.fit(first)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, batches(4))
    assert trainer.lightning_module is second and trainer.global_step == 8
    return state_of(first), state_of(second)


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
    return results, state_of(module)


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
    return trainer.global_step, state_of(module)


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
    return state_of(inner)
