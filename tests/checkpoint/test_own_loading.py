"""A LightningModule with a load_state_dict of its own: it renames old entries, ignores strict, or returns nothing.

Baseline: plain Lightning resumed from the same file; losses equal to 1e-5.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import quiet_trainer
from tanh_net import KeepsLosses
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import CheckpointError


class Net(KeepsLosses):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Renames(Net):
    """Knows entries by an old name, lets others be, and returns nothing."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert strict, "as plain Lightning passes it"
        renamed = {key.replace("blocks.", "layers."): value for key, value in state_dict.items()}
        super().load_state_dict(renamed, strict=False)


class Strict(Net):
    """Only counts how many entries there are."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.entries = len(state_dict)
        return super().load_state_dict(state_dict, strict=strict)


def resume(kind: str, strategy: Any, devices: int, path: str) -> Any:
    torch.manual_seed(1)
    module: Any = {"renames": Renames, "strict": Strict}[kind]()
    trainer = quiet_trainer(strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(data(), 4), ckpt_path=path)
    return module.losses, getattr(module, "entries", None)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)))


def run_all(path: str) -> dict[str, Any]:
    two = {
        kind: resume(kind, HolmesStrategy(pipeline_parallel_size=2), 2, f"{path}/{kind}.ckpt")
        for kind in ("renames", "strict")
    }
    sharded = HolmesStrategy(pipeline_parallel_size=1, sharding="parameters")
    return two | {"sharded": resume("renames", sharded, 2, f"{path}/renames.ckpt")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one epoch of plain Lightning: with old names and an entry more, and as it was saved."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder, filename="strict")
    quiet_trainer(max_epochs=1, callbacks=[saver], enable_checkpointing=True).fit(Net(), DataLoader(data(), 4))
    saved = torch.load(folder / "strict.ckpt", weights_only=False)
    old = {key.replace("layers.", "blocks."): value for key, value in saved["state_dict"].items()}
    torch.save(saved | {"state_dict": old | {"gone": torch.zeros(2)}}, folder / "renames.ckpt")
    return folder


@pytest.mark.xdist_group("own_loading")
def test_it_is_called_as_by_plain_lightning(files: Path) -> None:
    found = launch(2, "test_own_loading:run_all", str(files))
    for kind in ("renames", "strict"):
        losses, entries = resume(kind, "auto", 1, f"{files}/{kind}.ckpt")
        assert len(losses) == 4
        for of_rank in found:
            assert of_rank[kind][0] == pytest.approx(losses, rel=1e-5) and of_rank[kind][1] == entries
    assert len(found[0]["sharded"][0]) == 2


@pytest.mark.xdist_group("own_loading")
def test_what_it_does_not_rename_is_of_another_model(files: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"of another model than this Strict; it lacks layers\.0\.0\.weight.*gone"
    ):
        module = Strict()
        trainer = quiet_trainer(HolmesStrategy(), devices=1, max_epochs=2)
        trainer.fit(module, DataLoader(data(), 4), ckpt_path=files / "renames.ckpt")
