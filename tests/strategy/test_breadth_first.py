"""schedule="breadth_first" on one pipeline rank: a layer a stage where the module allows it, and nothing is refused that runs whole."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError


class Blocks(pl.LightningModule):
    """Six layers; ``skips``: the first one's output is read after the third one, beside the hidden state."""

    def __init__(self, *, skips: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.skips, self.counts, self.calls = skips, counts, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.counts:
            self.calls += 1
        hidden, kept = batch, batch
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden).tanh() + (kept if self.skips and index == 2 else 0)
            kept = hidden if index == 0 else kept
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoList(pl.LightningModule):
    """Nothing that could be a list of layers."""

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
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(4)
    trainer.fit(module, DataLoader(torch.randn(12, 4), batch_size=6))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "counts", "note"),
    [
        (Blocks, (1, 1, 1, 1, 1, 1), "num_chunks: 6, a layer a stage"),
        (lambda: Blocks(skips=True), (1, 3, 1, 1), "num_chunks: 4, as many stages as can be without losing a value"),
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
            lambda: Blocks(skips=True),
            {"partition": [2, 2, 2]},
            UnsupportedModuleError,
            "would lose output 0 of layer 0",
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
