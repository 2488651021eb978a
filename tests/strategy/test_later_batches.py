"""Parameters and outputs that only later batches read, and what a step changes: in layered order and with sharded parameters
the run is exact or refused by name; it never gives other numbers.

One process, except for one case on two; the step is traced from the first batch. Baseline where exact: plain Lightning, 1e-5.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import state_of
from launch import launch_raw
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import AbsentValueError, UnsupportedModuleError


def staged(payload: dict[str, Any]) -> None:
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": payload["schedule"]}
    made = Compiled if payload["compiled"] else Blocks
    fit(made(PARAMETERS[payload["name"]]), Path(payload["folder"]), HolmesStrategy(**options), devices=2)


WIDTH = 4
LAYERED = {"schedule": "breadth_first", "num_microbatches": 2}
SHARDS = {"sharding": "parameters", "num_microbatches": 2}


class Blocks(ByGradient):
    """Four layers; ``term(module, outputs)`` is added to the loss of the second epoch, ``act(module)`` runs first in each step."""

    def __init__(self, term: Callable[[Any, list[Tensor]], Any] | None = None, act: Callable[[Any], Any] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.counter = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.term, self.act = term, act

    @property
    def late(self) -> bool:
        return self.current_epoch == 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.act is not None:
            self.act(self)
        hidden, outputs = batch, []
        for layer in self.layers:
            hidden = layer(hidden).tanh()
            outputs.append(hidden)
        loss = hidden.square().mean() * (1 + self.counter)
        if self.late and self.term is not None:
            loss = loss + self.term(self, outputs)
        self.log("loss", loss)
        return loss


def fit(
    module: pl.LightningModule, folder: Path, strategy: Any, *, devices: int = 1, **trainer: Any
) -> dict[str, Tensor]:
    torch.manual_seed(3)
    for parameter in module.parameters():
        if parameter.ndim:
            nn.init.normal_(parameter, std=0.5)
    made = quiet_trainer(strategy, devices=devices, max_epochs=2, default_root_dir=folder, **trainer)
    made.fit(module, DataLoader(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(4)), batch_size=6))
    return state_of(module)


def refused(make: Callable[[], Any], reason: str, folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises((AbsentValueError, UnsupportedModuleError), match=reason):
        fit(make(), folder, HolmesStrategy(**options))


def exact(make: Callable[[], Any], folder: Path, options: dict[str, Any]) -> None:
    expected, found = fit(make(), folder, "auto"), fit(make(), folder, HolmesStrategy(**options))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def decay(module: Any, outputs: list[Tensor]) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in module.layers.parameters())  # type: ignore[return-value]


def condition(module: Any, outputs: list[Tensor]) -> float:
    return 1.0 if module.layers[0].weight.norm() > 0.1 else 0.0


PARAMETERS = {
    "a penalty": decay,
    "a condition": condition,
    "all norms at once": lambda module, outputs: torch.stack(torch._foreach_norm(list(module.parameters()))).sum(),
    "an operator": lambda module, outputs: 1 - module.layers[0].weight[0, 0],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_only_later_batches_read_are_refused_in_shards(name: str, tmp_path: Path) -> None:
    """The small ones, of which several come with the first stage, may be exact."""
    refused(
        lambda: Blocks(PARAMETERS[name]),
        r"layers\.\d.\w+ is read where it was not when .* sharding=.none.",
        tmp_path,
        SHARDS,
    )


class Named(nn.Parameter):
    """A parameter class of the user's own."""


@pytest.mark.parametrize("name", ["a penalty", "a condition"])
def test_parameters_of_a_class_of_ones_own_are_refused_likewise_and_keep_their_class(name: str, tmp_path: Path) -> None:
    def make(term: Any = None) -> Blocks:
        def look(module: Any) -> None:
            assert isinstance(module.layers[0].weight, Named)

        module = Blocks(term, act=look)
        for layer in module.layers:
            layer.weight = Named(layer.weight.data)
        return module

    module = make(PARAMETERS[name])
    refused(lambda: module, r"layers\.0\.weight is read where it was not when", tmp_path, SHARDS)
    assert type(module.layers[0].weight) is Named
    exact(make, tmp_path, SHARDS)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_of_another_stage_that_only_later_batches_read_is_refused_by_name(
    compiled: bool, tmp_path: Path
) -> None:
    payload = {"name": "a condition", "schedule": "1f1b", "folder": str(tmp_path), "compiled": compiled}
    workers = launch_raw(2, "test_later_batches:staged", payload, timeout_s=100, folder=tmp_path / "job")
    assert [worker.exit_code for worker in workers] == [1, 1], workers
    said = r"AbsentValueError: layers\.0\.weight is read where it was not when .* or use pipeline_parallel_size=1"
    assert all(re.search(said, worker.output) for worker in workers), workers


class Compiled(Blocks):
    """Each layer is compiled with backend "eager", since only what torch.compile guards on matters here."""

    def __init__(self, term: Any = None) -> None:
        super().__init__(term)
        for layer in self.layers:
            layer.compile(backend="eager")


@pytest.mark.parametrize("name", ["a penalty", "a condition"])
def test_parameters_of_compiled_layers_are_refused_likewise(name: str, tmp_path: Path) -> None:
    """Compiled code is given ordinary parameters, and can run with those of its own stage only."""
    refused(lambda: Compiled(PARAMETERS[name]), r"layers\.0\.weight is read where it was not when", tmp_path, SHARDS)
    if name == "a penalty":
        exact(Compiled, tmp_path, SHARDS)


def test_the_same_is_exact_where_parameters_stay_and_where_the_first_batch_reads_them(tmp_path: Path) -> None:
    exact(lambda: Blocks(decay), tmp_path, LAYERED)

    class Always(Blocks):
        late = True  # type: ignore[assignment]

    for options in (LAYERED, SHARDS):
        exact(lambda: Always(decay), tmp_path, options)


OUTPUTS: dict[str, Any] = {
    "deep supervision": (lambda module, outputs: 0.5 * outputs[0].square().mean(), 0),
    "a condition": (lambda module, outputs: 1.0 if outputs[0].detach().norm() > 0.01 else 0.0, 0),
    "a log": (lambda module, outputs: module.log("seen", outputs[1][0, 0]) or 0.0, 1),
}


@pytest.mark.parametrize("options", [LAYERED, SHARDS], ids=["whole", "shards"])
def test_outputs_that_only_later_batches_read_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    for name, (term, layer) in OUTPUTS.items():
        reason = f"output 0 of layer {layer} of layers is read where it was not when .* num_chunks=1"
        refused(functools.partial(Blocks, term), reason, tmp_path, options)
        if name == "a condition":
            exact(functools.partial(Blocks, term), tmp_path, {**options, "num_chunks": 1, "num_microbatches": 1})


def test_a_gradient_from_another_stage_than_its_own_is_refused(tmp_path: Path) -> None:
    """The last stage but one is still gathered when the last stage reads it: the value is right, but its gradient would be lost."""
    beside = lambda module, outputs: 0.1 * module.layers[2].weight.square().sum()  # noqa: E731
    refused(
        lambda: Blocks(beside),
        r"layers\.2\.weight is given a gradient while its own stage is not computed",
        tmp_path,
        SHARDS,
    )
    watched = lambda module, outputs: 0.1 * module.layers[2].weight.detach().square().sum()  # noqa: E731
    exact(lambda: Blocks(watched), tmp_path, SHARDS)


def clamp(module: Any) -> None:
    with torch.no_grad():
        module.layers[3].weight.clamp_(-0.3, 0.3)


def clamp_data(module: Any) -> None:
    module.layers[3].weight.data.clamp_(-0.3, 0.3)


def renormalise(module: Any) -> None:
    module.layers[3].weight.data = torch.renorm(module.layers[3].weight.data, 2, 0, 0.4)


def count(module: Any) -> None:
    module.counter.data += 1


CHANGES = {"in place": clamp, "by data": clamp_data, "other memory": renormalise, "a frozen counter": count}


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_that_the_step_changes_is_refused_in_shards(name: str, tmp_path: Path) -> None:
    """The step changes the parameter from the first batch on, or from the second epoch on."""
    from_first = name in ("in place", "a frozen counter")

    def act(module: Any) -> None:
        if from_first or module.late:
            CHANGES[name](module)

    what = "counter" if name == "a frozen counter" else r"layers\.3\.weight"
    refused(lambda: Blocks(act=act), f"the step changes {what}, of which .* sharding=.none.", tmp_path, SHARDS)
    if name == "in place":
        exact(lambda: Blocks(act=act), tmp_path, {**LAYERED, "num_microbatches": 1})


class Clamped(nn.Linear):
    """Clamps its weight in its forward, from the second epoch on if ``late``."""

    def __init__(self, late: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.clamps = not late

    def forward(self, hidden: Tensor) -> Tensor:
        if self.clamps:
            self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(hidden)


class InLayers(Blocks):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Clamped(late) for _ in range(4))

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.clamps |= self.late


def test_layers_that_change_their_parameters_are_refused_before_the_first_step_or_when_they_do(tmp_path: Path) -> None:
    before = r"a layer changes layers\.0\.weight in place in its forward.*; use sharding=.none."
    refused(lambda: InLayers(late=False), before, tmp_path, SHARDS)
    refused(lambda: InLayers(late=True), r"the step changes layers\.0\.weight", tmp_path, SHARDS)
    exact(lambda: InLayers(late=False), tmp_path, {"sharding": "auto", "num_microbatches": 1})


class Tied(Blocks):
    """A head that shares the first layer's memory."""

    def __init__(self, how: str) -> None:
        super().__init__(act=None)
        first = self.layers[0].weight
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if how == "data":
            self.head.weight.data = first.data
        elif how == "transposed":
            self.head.weight.data = first.data.t()
        elif how == "buffer":
            self.register_buffer("kept", first.data)
        elif how == "attribute":
            self.kept = first.data
        elif how == "flat":
            self.flat = nn.Parameter(torch.zeros(2 * WIDTH * WIDTH), requires_grad=False)
            first.data = self.flat.data[: WIDTH * WIDTH].view(WIDTH, WIDTH)
        elif how == "views":
            memory = torch.zeros(2, WIDTH, WIDTH)
            first.data, self.head.weight.data = memory[0], memory[1]
        else:
            self.head.weight = first

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        kept = getattr(self, "kept", getattr(self, "flat", hidden.new_ones(1)))
        return self.head(hidden).square().mean() * (1 + kept.square().sum())


@pytest.mark.parametrize("how", ["data", "transposed", "buffer", "attribute", "flat"])
def test_memory_that_would_be_cut_apart_is_refused_in_shards_and_exact_in_layered_order(
    how: str, tmp_path: Path
) -> None:
    other = {"buffer": "kept", "attribute": "kept.0", "flat": "flat"}.get(how, "head.weight")
    names = (
        rf"({other} and layers\.0\.weight|layers\.0\.weight and {other}) lie in the same memory.*use sharding=.none."
    )
    refused(lambda: Tied(how), names, tmp_path, SHARDS)
    if how in ("transposed", "buffer"):
        exact(lambda: Tied(how), tmp_path, LAYERED)


@pytest.mark.parametrize("how", ["same parameter", "views"])
def test_parameters_that_are_one_object_or_lie_side_by_side_are_exact_in_shards(how: str, tmp_path: Path) -> None:
    exact(lambda: Tied(how), tmp_path, SHARDS)


class OfTypes(nn.Module):
    """A layer whose parameters have two, four and eight bytes an element, in numbers that leave the next ones unaligned."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight * (1 + self.wide).float() + self.narrow.float().sum()


class Mixed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfTypes() for _ in range(4))


def test_parameters_of_unlike_types_are_exact_in_shards(tmp_path: Path) -> None:
    exact(Mixed, tmp_path, SHARDS | {"num_microbatches": 1})


class Failing(pl.Callback):
    """Raises in the second epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 1:
            raise self.error("in mid-run")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_that_fails_leaves_the_weights_of_its_last_step_as_plain_lightning_does(
    error: Any, tmp_path: Path
) -> None:
    left = []
    for strategy in ("auto", HolmesStrategy(**SHARDS)):
        module = Blocks()
        with pytest.raises((error, SystemExit)):  # Lightning turns KeyboardInterrupt into SystemExit
            fit(module, tmp_path, strategy, callbacks=[Failing(error)])
        left.append(state_of(module))
    torch.testing.assert_close(left[1], left[0], rtol=1e-5, atol=1e-6)
    assert all(type(p) is nn.Parameter for p in module.parameters())


KEPT: dict[str, list[Tensor]] = {"given": [], "made": []}


class Writing(nn.Module):
    """A layer that doubles its input in place once ``writes`` is set; inputs and outputs of training steps are kept, not a trial's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how, self.writes = how, False

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            KEPT["given"].append(hidden.detach())
        if self.writes and self.how == "a layer":
            hidden.mul_(2)
        elif self.writes and self.how == "a layer, data":
            hidden.data.mul_(2)
        output: Tensor = self.linear(hidden)
        if torch.is_grad_enabled():
            KEPT["made"].append(output.detach())
        return output


class Written(Blocks):
    """The hidden state is changed in place from the second epoch on: inside all layers but the first, or between layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Writing(how) for _ in range(4))

    def on_train_epoch_start(self) -> None:
        for kept in KEPT.values():
            kept.clear()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for index, layer in enumerate(self.layers):
            layer.writes = self.late and index > 0
            hidden = layer(hidden)
            if self.late and self.how == "between":
                hidden.mul_(2)
            elif self.late and self.how == "between, data":
                hidden.data.mul_(2)
        return hidden.square().mean()


@pytest.mark.parametrize("how", ["a layer", "a layer, data"])
@pytest.mark.parametrize("options", [LAYERED, SHARDS], ids=["layered", "shards"])
def test_a_hidden_state_that_layers_change_in_place_in_later_batches_is_exact(
    how: str, options: dict[str, Any], tmp_path: Path
) -> None:
    exact(lambda: Written(how), tmp_path, options)


@pytest.mark.parametrize("how", ["between", "between, data"])
def test_a_hidden_state_that_is_changed_in_place_between_layers_in_later_batches_is_refused(
    how: str, tmp_path: Path
) -> None:
    refused(lambda: Written(how), "the step changes output 0 of layer 0 of layers", tmp_path, LAYERED)


def test_a_stage_is_given_what_the_one_before_it_made_and_no_copy(tmp_path: Path) -> None:
    fit(Written("nothing"), tmp_path, HolmesStrategy(**LAYERED))
    given, made = ({tensor.data_ptr() for tensor in KEPT[kind]} for kind in ("given", "made"))
    assert len(given & made) == 3 * 2, "stages after the first, microbatches"
