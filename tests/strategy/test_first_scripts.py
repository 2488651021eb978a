"""What is tried first: a script without a seed, batches of parts of unlike sizes, a step that cannot run over parts of a batch.

Baseline: plain Lightning on the first stage's data. Tolerance: 1e-5 relative.
"""

from typing import Any

import pytest
import torch
from launch import launch
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import CombinedLoader
from quiet import quiet_trainer
from tanh_net import KeepsLosses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError, HolmesError


class Net(KeepsLosses):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch[0]).mean())


class Pairs(Net):
    """Two lists of two tensors: 4 labelled samples and 8 unlabelled ones, seen in two ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["labelled"]
        weak, strong = batch["unlabelled"]
        out = self.layers(torch.cat([x, weak, strong]))
        return F.cross_entropy(out[:4], y) + (out[4:12] - out[12:]).square().mean()


class Normed(Net):
    """Refuses to work on fewer than three samples, as some metrics do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) < 3:
            raise ValueError("too few samples")
        return super().training_step(batch, batch_idx)


class OwnNoise(Dataset[Any]):
    """Augments with a generator of its own, as albumentations does."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return [torch.full((4,), index / 16) + torch.randn(4, generator=self.generator)]


def made(name: str, rank: int) -> tuple[Net, Any]:
    torch.manual_seed(rank)  # a script without a seed
    if name == "pairs":
        few = TensorDataset(torch.randn(8, 4), torch.arange(8) % 4)
        many = TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
        loaders = {"labelled": DataLoader(few, 4), "unlabelled": DataLoader(many, 8)}
        return Pairs(), CombinedLoader(loaders, mode="min_size")
    data = OwnNoise(rank) if name == "own noise" else TensorDataset(torch.randn(16, 4))
    return (Normed() if name == "too few" else Net()), DataLoader(data, batch_size=4)


def run(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        strategy = HolmesStrategy(pipeline_parallel_size=2)
        trainer = quiet_trainer(strategy, devices=2, max_epochs=2, limit_val_batches=0 if name == "pairs" else 2)
        module, loader = made(name, trainer.global_rank)
        trainer.fit(module, loader, None if name == "pairs" else loader)
        found[name] = module.losses, dict(module.state_dict()), strategy.plan.num_microbatches
    return found


NAMES = ["no seed", "own noise", "pairs", "too few"]


@pytest.fixture(scope="module")
def runs() -> Any:
    return launch(2, "test_first_scripts:run", NAMES)


@pytest.mark.xdist_group("first_scripts")
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_in_plain_lightning(name: str, runs: Any) -> None:
    module, loader = made(name, 0)
    trainer = quiet_trainer(max_epochs=2, limit_val_batches=0 if name == "pairs" else 2)
    trainer.fit(module, loader, None if name == "pairs" else loader)
    for losses, state, num_microbatches in (result[name] for result in runs):
        assert losses == pytest.approx(module.losses, rel=1e-5)
        torch.testing.assert_close(state, dict(module.state_dict()), rtol=1e-5, atol=1e-6)
        assert num_microbatches == 1 or name in ("no seed", "own noise")


def test_a_step_that_fails_over_a_part_says_so() -> None:
    module, loader = made("too few", 0)
    strategy = HolmesStrategy(pipeline_parallel_size=1, num_microbatches=2)
    trainer = quiet_trainer(strategy, devices=1, max_epochs=1)
    with pytest.raises(ValueError, match="too few") as failed:
        trainer.fit(module, loader)
    assert "ran over microbatch 0 of 2" in "".join(failed.value.__notes__)


def test_batch_normalisation_over_replicas_is_refused() -> None:
    found = launch(2, "test_first_scripts:synchronised")
    for words in found:
        assert (
            "Trainer(sync_batchnorm=True): Norms has batch normalisation (layers.4)" in words and "GroupNorm" in words
        )


class Norms(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(4))


def synchronised(_: Any) -> str:
    strategy = HolmesStrategy(pipeline_parallel_size=1)
    trainer = quiet_trainer(strategy, devices=2, sync_batchnorm=True, max_epochs=1)
    try:
        trainer.fit(Norms(), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    except HolmesError as refusal:
        return str(refusal)
    return ""


def test_a_notebook_runs_one_process_and_is_told_why_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    module, loader = made("no seed", 0)
    quiet_trainer("holmes", devices=1, max_epochs=1).fit(module, loader)
    assert len(module.losses) == 4
    with pytest.raises(ConfigurationError, match=r"devices=2, num_nodes=1 in a notebook: .* into a script"):
        quiet_trainer("holmes", devices=2)


class LogsNone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("foo", None)  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_logged_is_named_as_by_lightning() -> None:
    trainer = quiet_trainer("holmes", devices=1)
    with pytest.raises(ValueError, match=r"`self.log\(foo, None\)` was called, but `NoneType` values cannot be logged"):
        trainer.fit(LogsNone(), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
