"""A Trainer, a module or a process that is used more than once, and copies of modules that have run."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torchmetrics
from comparing import state_of
from contract import Run, each
from contract_models import Net, batches, same


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = {"pickle": pickled, "deepcopy": copy.deepcopy}


@each(**COPIES)
def case_a_module_is_copied_after_a_fit(run: Run, make: Any):
    module = Net()
    run.fit(module)
    other = make(module)
    assert same(state_of(other), state_of(module))
    run.fit(other)
    assert not same(state_of(other), state_of(module))
    return state_of(other)


class WithMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(batch[:, 0])
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return self.loss(batch)


def case_metrics_are_pickled_with_their_module(run: Run):
    module = WithMetric()
    run.fit(module)
    other = pickled(module)
    other.mean.update(1.0)
    assert float(other.mean.compute()) == 1.0


def case_a_state_dict_goes_into_a_module_of_plain_torch(run: Run):
    module = Net()
    run.fit(module)
    plain = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    plain.load_state_dict({name.removeprefix("layers."): value for name, value in module.state_dict().items()})
    rows = next(iter(batches(1)))
    torch.testing.assert_close(torch.tanh(plain[1](torch.tanh(plain[0](rows)))), module(rows))


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
