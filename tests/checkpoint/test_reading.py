"""Lightning's own ways of reading a checkpoint give the same for checkpoint folders as for plain Lightning's files."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint.finding import is_folder
from lightning_holmes.errors import CheckpointError


class Scale:
    """A hyperparameter that is not plain data."""


class Net(pl.LightningModule):
    def __init__(self, width: int = 4, scale: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4)])
        self.tied = self.layers[0]
        self.seen = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        hidden = batch[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(16, 4)), self.hparams["batch_size"])


def fit(folder: Path, strategy: Any, *, epochs: int = 1, ckpt_path: Any = None, **given: Any) -> pl.Trainer:
    torch.manual_seed(0)
    trainer = quiet_trainer(
        strategy, enable_checkpointing=True, devices=1, max_epochs=epochs, callbacks=[ModelCheckpoint(folder)]
    )
    trainer.fit(Net(width=6, **given), datamodule=Data(2), ckpt_path=ckpt_path)
    return trainer


def best(trainer: pl.Trainer) -> str:
    return str(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a checkpoint folder of a run with the strategy, and a checkpoint file of a run with plain Lightning."""
    root = tmp_path_factory.mktemp("reading")
    found = [
        best(fit(root / "ours", HolmesStrategy(save_distributed_checkpoint=True))),
        best(fit(root / "plain", "auto")),
    ]
    assert [is_folder(path) for path in found] == [True, False]
    return found


@pytest.mark.xdist_group("checkpoint_reading")
def test_load_from_checkpoint_reads_the_best_models_folder_as_it_reads_a_file(paths: list[str]) -> None:
    ours, plain = (Net.load_from_checkpoint(path) for path in paths)
    assert ours.hparams == plain.hparams == {"width": 6, "scale": None} and ours.seen == plain.seen == 8
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    assert Data.load_from_checkpoint(Path(paths[0])).hparams["batch_size"] == 2
    with pytest.raises(FileNotFoundError):
        Net.load_from_checkpoint("nowhere.ckpt")


@pytest.mark.xdist_group("checkpoint_reading")
@pytest.mark.parametrize(
    "place", ["meta", torch.device("meta"), {"cpu": "meta"}, lambda s, _: torch.empty(0, device="meta")]
)
def test_map_location_says_where_everything_goes(paths: list[str], place: Any) -> None:
    moved = saving.pl_load(paths[0], map_location=place)  # type: ignore[attr-defined]
    states = [*moved["optimizer_states"][0]["state"][0].values(), *moved["state_dict"].values()]
    assert {value.device.type for value in states} == {"meta"}
    assert len({id(moved["state_dict"][name]) for name in ("layers.0.weight", "tied.weight")}) == 1


@pytest.mark.xdist_group("checkpoint_reading")
def test_another_strategys_run_goes_on_from_a_folder_as_from_a_file(paths: list[str], tmp_path: Path) -> None:
    ours, plain = (fit(tmp_path / str(n), "auto", epochs=2, ckpt_path=path) for n, path in enumerate(paths))
    assert ours.global_step == plain.global_step == 16
    for left, right in zip(ours.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(left, right)


def test_hyperparameters_of_ones_own_classes_need_trust_as_in_a_file(tmp_path: Path) -> None:
    path = best(fit(tmp_path, HolmesStrategy(save_distributed_checkpoint=True), scale=Scale()))
    with pytest.raises(CheckpointError, match="weights_only=False"):
        Net.load_from_checkpoint(path)
    assert isinstance(Net.load_from_checkpoint(path, weights_only=False).hparams["scale"], Scale)


@pytest.mark.xdist_group("checkpoint_reading")
def test_what_was_cut_off_is_named(paths: list[str], tmp_path: Path) -> None:
    torn = tmp_path / "torn.ckpt"
    torn.mkdir()
    (torn / "meta.pt").touch()
    with pytest.raises(CheckpointError, match=r"torn\.ckpt"):
        Net.load_from_checkpoint(torn)
