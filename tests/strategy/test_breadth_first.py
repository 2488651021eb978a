"""schedule="breadth_first" on one pipeline rank: one layer a stage where the module allows it, and no module that runs whole is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from kept_output_cases import FAMILIES, WIDTH, UNet, fit, fit_all
from launch import launch
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.plan.partition import Partition


class Keeping(nn.Linear):
    """Keeps a tensor of its forward as an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = super().forward(hidden)
        return self.kept.sin()


class Blocks(pl.LightningModule):
    """Six layers; with ``keeps``, a tensor from inside the second layer is read after the third."""

    def __init__(self, *, keeps: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping() if keeps and n == 1 else nn.Linear(4, 4) for n in range(6))
        self.keeps, self.counts, self.calls = keeps, counts, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.counts:
            self.calls += 1
        hidden = batch
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden).tanh()
            if self.keeps and index == 2:
                hidden = hidden + self.layers[1].kept  # type: ignore[operator]
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoList(pl.LightningModule):
    """A module without a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(module: pl.LightningModule, strategy: Any, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    trainer = quiet_trainer(strategy, devices=1, max_epochs=2, default_root_dir=folder)
    torch.manual_seed(4)
    trainer.fit(module, DataLoader(torch.randn(12, 4), batch_size=6))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "counts", "note"),
    [
        (Blocks, (1, 1, 1, 1, 1, 1), "num_chunks: 6, a layer a stage"),
        (lambda: Blocks(keeps=True), (1, 3, 1, 1), "num_chunks: 4, as many stages as can be without losing a value"),
        (lambda: Blocks(counts=True), (6,), "num_chunks: 1, so that nothing is layered: the step changes calls"),
        (NoList, (1,), "num_chunks: 1, so that nothing is layered: ConfigurationError: NoList has no nn.ModuleList"),
    ],
)
def test_as_many_stages_as_the_module_allows_with_the_numbers_of_plain_lightning(
    make: Any, counts: tuple[int, ...], note: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy = HolmesStrategy(schedule="breadth_first", num_microbatches=3)
    found = fitted(make(), strategy, tmp_path)
    assert strategy.plan.partition.layer_counts == counts
    assert any(entry.startswith(note) for entry in strategy.plan.notes), strategy.plan.notes
    assert ("breadth_first" in capfd.readouterr().out) == (len(counts) > 1), "the plan of several stages is printed"
    for name, expected in fitted(make(), "auto", tmp_path).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("make", "options", "error", "reason"),
    [
        (Blocks, {"num_chunks": 7}, ConfigurationError, "6 layers cannot fill 7 stages"),
        (
            lambda: Blocks(keeps=True),
            {"partition": [2, 2, 2]},
            UnsupportedModuleError,
            "would lose a value computed inside layer 1",
        ),
        (lambda: Blocks(counts=True), {"num_chunks": 3}, UnsupportedModuleError, "the step changes calls before"),
        (NoList, {"num_chunks": 2}, ConfigurationError, "no nn.ModuleList or nn.Sequential"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_refused(
    make: Any, options: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        fitted(make(), HolmesStrategy(schedule="breadth_first", num_microbatches=2, **options), tmp_path)


def assert_same(found: Any, expected: Any) -> None:
    (state, logs), (wanted, wanted_logs) = found[:2], expected[:2]
    assert logs == pytest.approx(wanted_logs, rel=1e-5)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=name)


class Skipping(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_batch_that_is_skipped_before_the_layers_is_refused_by_what_it_returned(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match="training_step returned None before the layers of stage 0 of 6"):
        fitted(Skipping(), HolmesStrategy(schedule="breadth_first", num_microbatches=2), tmp_path)


class Hooked(Blocks):
    """A hook on a layer records the gradients that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Tensor]] = []
        self.layers[1].register_full_backward_hook(lambda _, given, of: self.seen.append([*given, *of]))  # type: ignore[arg-type]


def test_a_hook_on_a_layers_gradients_is_given_both_and_its_layer_ends_no_stage(tmp_path: Path) -> None:
    """The hook must get both gradients. On a stage that begins after the layer, torch would pass None for the gradient of its input."""
    plain, layered = Hooked(), Hooked()
    fitted(plain, "auto", tmp_path)
    fitted(layered, HolmesStrategy(schedule="breadth_first", num_microbatches=1), tmp_path)
    assert plain.seen and len(plain.seen) == len(layered.seen)
    torch.testing.assert_close(layered.seen, plain.seen, rtol=1e-5, atol=1e-7)
    structure = trace_step(plain, "training_step", (torch.ones(2, 4), 0))
    assert structure.forbidden_cuts() == structure.forbidden_cuts(one_rank=True) == [1]
    with pytest.raises(UnsupportedModuleError, match=r"would lose the gradient of its input for a hook on layers\.1 "):
        structure.check_partition(Partition((2, 4)))
    plain.register_full_backward_hook(lambda *_: None)  # type: ignore[arg-type]
    structure = trace_step(plain, "training_step", (torch.ones(2, 4), 0))
    assert structure.forbidden_cuts() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_that_are_read_again_are_handed_to_the_stages_of_their_rank(name: str, tmp_path: Path) -> None:
    """Baseline: plain Lightning, 1e-5; also in validation, with ragged microbatches, and with sharded parameters."""
    expected = fit(name, "auto", tmp_path)
    for options in ({"num_microbatches": 1}, {"num_microbatches": 3, "partition": [1, 3, 2]}):
        *found, strategy = fit(name, HolmesStrategy(schedule="breadth_first", **options), tmp_path)
        assert_same(found, expected)
        assert strategy.plan.partition.layer_counts == tuple(options.get("partition", [1] * 6))
    assert_same(fit(name, HolmesStrategy(sharding="parameters", num_microbatches=2), tmp_path), expected)


def test_outputs_that_are_read_again_with_parameters_in_shards_on_two_ranks(tmp_path: Path) -> None:
    ranks = launch(2, f"{fit_all.__module__}:fit_all", str(tmp_path), timeout_s=120)
    for name in FAMILIES:
        expected = fit(name, "auto", tmp_path)
        for rank in ranks:
            assert_same(rank[name], expected)
            assert rank[name][2] == (1,) * 6


def test_between_ranks_such_outputs_are_refused_by_name(tmp_path: Path) -> None:
    structure = trace_step(UNet(), "training_step", (torch.randn(4, WIDTH), 0))
    assert structure.forbidden_cuts(one_rank=True) == []
    with pytest.raises(UnsupportedModuleError, match=r"would lose output 0 of layer 0, read in layer 5"):
        structure.check_partition(Partition((3, 3)))
