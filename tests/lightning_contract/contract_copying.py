"""Pickling and copying of trainers, modules and callbacks, before and after they have run."""

import copy
import pickle
from typing import Any

import torch
import torchmetrics
from contract import Run, each
from contract_models import Net, batches, same, weights
from lightning.pytorch.callbacks import Callback


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = {"pickle": pickled, "deepcopy": copy.deepcopy}


@each(**COPIES)
def case_a_trainer_is_copied_before_it_runs(run: Run, make: Any):
    trainer = make(run.trainer(max_epochs=2))
    trainer.fit(Net(), batches(2))
    assert trainer.global_step == 4


@each(**COPIES)
def case_a_copy_of_a_trainer_goes_on(run: Run, make: Any):
    module = Net()
    other = make(run.fit(module))
    other.fit_loop.max_epochs = 2
    other.fit(module, batches(4))
    assert other.global_step == 8
    return weights(module)


@each(**COPIES)
def case_a_module_is_copied_after_a_fit(run: Run, make: Any):
    module = Net()
    run.fit(module)
    other = make(module)
    assert same(weights(other), weights(module))
    run.fit(other)
    assert not same(weights(other), weights(module))
    return weights(other)


def case_a_copy_in_a_hook_is_a_module_of_its_own(run: Run):
    copies: list[Any] = []

    class Copies(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            copies.append(copy.deepcopy(module))

    module = Net()
    run.fit(module, callbacks=[Copies()], max_epochs=2)
    assert copies[0] is not module and copies[0].layers[0].weight is not module.layers[0].weight


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
