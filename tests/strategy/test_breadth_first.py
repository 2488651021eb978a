"""schedule="breadth_first" on one pipeline rank: one layer a stage where the module allows it, and no module that runs whole is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.plan.partition import Partition

WIDTH, SAMPLES = 4, 10


class Family(ByGradient):
    """Six layers; ``hidden`` runs them and the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def hidden(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.hidden(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.hidden(batch).square().mean())


class UNet(Family):
    """Skip connections from the first two layers to the last two, through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bridge = nn.Linear(WIDTH, WIDTH)

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, skips = batch, []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + self.bridge(skips.pop())) if index > 3 else layer(hidden)
            hidden = hidden.tanh()
            if index < 2:
                skips.append(hidden)
        return hidden


class ResidualOutside(Family):
    """Layers whose outputs are added in place to a residual sum outside of them."""

    def hidden(self, batch: Tensor) -> Tensor:
        hidden = batch.clone()
        for layer in self.layers:
            hidden += layer(hidden.tanh())
        return hidden


class Mixed(Family):
    """A learned mix of all layers' outputs, under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, 6))

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, found = batch, []
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False).tanh()
            found.append(hidden)
        weights = self.weights.softmax(0)
        return sum(weight * each for weight, each in zip(weights, found, strict=True))  # type: ignore[return-value]


class DeeplySupervised(Family):
    """A head that is applied to each layer's output (deep supervision)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, judged = batch, []
        for layer in self.layers:
            hidden = layer(hidden).tanh()
            judged.append(self.head(hidden))
        return torch.cat(judged, dim=-1)


class Pair(nn.Module):
    """A layer that returns a hidden state and a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        hidden, extra = self.both(hidden).tanh().chunk(2, dim=-1)
        return {"hidden": hidden, "extra": extra}


class Dense(Family):
    """Each layer returns two tensors, of which one is read by all layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(6))

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, extras = batch, []
        for layer in self.layers:
            found = layer(hidden + sum(extras))
            hidden = found["hidden"]
            extras.append(found["extra"])
        return hidden


class Frozen(UNet):
    """A UNet whose first two layers, whose outputs later layers read, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)


FAMILIES: dict[str, type[Family]] = {
    each.__name__: each for each in (UNet, ResidualOutside, Mixed, DeeplySupervised, Dense, Frozen)
}


def fit(
    name: str, strategy: Any, folder: Path, *, replicas: int = 1
) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """Return parameters and logs after two epochs, each of a whole batch and a ragged one for every replica; and the strategy."""
    torch.manual_seed(3)
    module = FAMILIES[name]()
    trainer = quiet_trainer(
        strategy,
        devices=replicas,
        max_epochs=2,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(4))
    trainer.fit(module, DataLoader(data, 7), DataLoader(data, 7))  # the same on each replica: their mean is that of one
    logs = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value.clone() for key, value in module.state_dict().items()}, logs, trainer.strategy


def fit_all(folder: str) -> dict[str, Any]:
    """Fit each family with sharded parameters on two ranks; return parameters, logs and layer counts by name."""
    found = {}
    for name in FAMILIES:
        strategy = HolmesStrategy(sharding="parameters", num_microbatches=2, partition=[1] * 6)
        state, logs, strategy = fit(name, strategy, Path(folder), replicas=2)
        found[name] = state, logs, strategy.plan.partition.layer_counts
    return found


class Keeping(nn.Linear):
    """Keeps a tensor of its forward as an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = super().forward(hidden)
        return self.kept.sin()


class Blocks(ByGradient):
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


class NoList(ByGradient):
    """A module without a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(batch).square().mean()


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
    torch.testing.assert_close(found, fitted(make(), "auto", tmp_path), rtol=1e-5, atol=1e-6)


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
