"""What the trace of one microbatch shows: which layers read which parameter, which values cross split points, and where a
split loses a value."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.checking.first_step import attached
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.pipeline.own_generators import find_generators, states_of
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.plan.partition import Partition

AFTER = 3  # the place after the last of three layers


class Net(LightningModule):
    """A stem, three layers, a head; subclasses override ``path``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(1))

    def path(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.path(batch).square().mean()


def traced(module: LightningModule, layers: str = "auto") -> ModuleStructure:
    with attached(module):
        return trace_step(module, "training_step", (torch.randn(6, 4), 0), layers=layers)


def test_parameters_are_read_where_they_are_read() -> None:
    found = traced(Net())
    assert found.layers == "layers" and found.layer_names == ("layers.0", "layers.1", "layers.2")
    assert found.readers == {
        "stem.weight": {0},  # together with layer 0, whose input it makes
        "stem.bias": {0},
        **{f"layers.{i}.{kind}": {i} for i in range(3) for kind in ("weight", "bias")},
        "head.weight": {AFTER},
        "head.bias": {AFTER},
        "unused": set(),
    }
    assert found.bypasses == () and found.early_changes == ()
    partition = Partition((2, 1))
    assert found.parameters_of(partition, 0) == {n for n in found.readers if not n.startswith(("head", "layers.2"))}
    assert found.stages_of(partition, "unused") == (0, 1), "what no traced step reads is on every stage"


def test_values_in_objects_are_followed_one_by_one() -> None:
    class Meter:
        def __init__(self) -> None:
            self.early, self.late, self.last = 0, 0, 0.0

    class Keeping(Net):
        reads = "early"

        def __init__(self) -> None:
            super().__init__()
            self.meter = Meter()

        def path(self, x: Tensor) -> Tensor:
            self.meter.early += 1
            x = super().path(x * (1 + getattr(self.meter, self.reads)))
            self.meter.late += 1
            return x

    class ReadingTheLastStep(Keeping):
        reads = "late"

    found = traced(Keeping())
    assert found.bypasses == () and sorted(found.kept_values) == ["meter.early", "meter.late"]
    assert found.early_changes == ("meter.early",)
    (bypass,) = traced(ReadingTheLastStep()).bypasses
    assert "meter.late" in bypass.what and "read before the layers of the next step" in bypass.what


@pytest.mark.parametrize(
    "make",
    [lambda: np.random.default_rng(0), lambda: np.random.RandomState(0), lambda: random.Random(0)],
    ids=["Generator", "RandomState", "Random"],
)
def test_draws_from_a_generator_of_its_own_are_allowed_outside_of_the_layers(make: Callable[[], Any]) -> None:
    class Drawing(Net):
        where = "before"

        def __init__(self) -> None:
            super().__init__()
            self.noise = {"of": [make()]}

        def draw(self, where: str) -> float:
            return float(self.noise["of"][0].uniform(0.0, 1.0)) if where == self.where else 0.5

        def path(self, x: Tensor) -> Tensor:
            return super().path(x * self.draw("before")) * self.draw("after")

    module = Drawing()
    state = states_of(find_generators(module))
    for module.where in ("before", "after"):
        assert traced(module).draws == ("self.noise.of.0",)
    module.where = ""
    assert traced(module).draws == ()
    module.layers[1].register_forward_hook(lambda *_: module.draw("in"))
    module.where = "in"
    message = r"Drawing.training_step draws from self.noise.of.0, a generator of its own in its layers or between them"
    with pytest.raises(UnsupportedModuleError, match=message):
        traced(module)
    assert states_of(find_generators(module)) == state != {}


def test_the_module_itself_is_left_as_it_was() -> None:
    class Counting(Net):
        calls = 0

        def path(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.layers[0].extra_state = x
            return super().path(x)

    module = Counting()
    before = {name: p.clone() for name, p in module.named_parameters()}
    traced(module)
    assert module.calls == 0 and "calls" not in vars(module) and "extra_state" not in vars(module.layers[0])
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("order", "message"),
    [((0, 2, 1), "calls no list of layers once each and in order"), ((0, 1, 1, 2), "once each"), ((0, 1), "once each")],
)
def test_layers_out_of_order_are_refused(order: tuple[int, ...], message: str) -> None:
    class Wandering(Net):
        def path(self, x: Tensor) -> Tensor:
            for index in order:
                x = self.layers[index](x)
            return self.head(x)

    with pytest.raises(UnsupportedModuleError, match=message):
        traced(Wandering())


def test_a_list_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="blocks"):
        traced(Net(), layers="blocks")
