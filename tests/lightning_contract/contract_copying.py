"""Pickling and copying of trainers, modules and callbacks, before and after they have run."""

import copy
import pickle
from typing import Any

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
