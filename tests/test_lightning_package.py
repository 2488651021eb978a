"""Both packages of Lightning work: `lightning` and `pytorch_lightning`, which are the same code under two names."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import lightning.fabric.plugins.io.torch_io as torch_io
import lightning.pytorch as pl
import pytest
from parsing import parsed

import lightning_holmes
from lightning_holmes.lightning_package import introduce

PACKAGE = Path(lightning_holmes.__file__).parent
FIT = """
import os
import sys
import lightning_holmes
import torch
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

def fit(strategy, epochs, resumed=None):
    pl.seed_everything(0)
    module, saves = Net(), ModelCheckpoint(f"{sys.argv[1]}/{strategy}{epochs}", filename="end")
    data = DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    if strategy == "holmes":
        devices = 2
        strategy = lightning_holmes.HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2)
    else:
        devices = 1
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, logger=False, callbacks=[saves],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=resumed)
    return [p.detach() for p in module.parameters()], saves.best_model_path or f"{saves.dirpath}/end.ckpt"

fit("holmes", 1)
staged, path = fit("holmes", 2, f"{sys.argv[1]}/holmes1/end.ckpt")
if os.environ.get("LOCAL_RANK", "0") == "0":
    alone, _ = fit("auto", 2)
    for one, other in zip(staged, alone):
        torch.testing.assert_close(one, other)
    for one, other in zip(Net.load_from_checkpoint(path).parameters(), alone):
        torch.testing.assert_close(one.detach(), other)
    report = lightning_holmes.check(Net(), torch.randn(4, 8), pipeline_parallel_size=2)
    assert report.ok, report
    print("exact")
"""
OTHER = """
{imports}
from lightning_holmes import HolmesStrategy
for strategy in ({strategies}):
    try:
        other.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    except lightning_holmes.ConfigurationError as error:
        print("refused:", error)
"""


def run(script: str, tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.versions
def test_a_script_of_pytorch_lightning_trains_a_pipeline_resumes_and_loads(tmp_path: Path) -> None:
    """The imports are sorted as usual: lightning_holmes stands before pytorch_lightning."""
    assert "exact" in run(FIT, tmp_path)


@pytest.mark.parametrize(
    ("imports", "strategies"),
    [
        ("import lightning.pytorch, pytorch_lightning as other, lightning_holmes", '"holmes", HolmesStrategy()'),
        ("import pytorch_lightning, lightning_holmes, lightning.pytorch as other", "HolmesStrategy(),"),
    ],
    ids=["pytorch_lightning", "lightning, imported last"],
)
def test_a_trainer_of_the_package_that_is_not_used_is_refused(imports: str, strategies: str, tmp_path: Path) -> None:
    said = run(OTHER.format(imports=imports, strategies=strategies), tmp_path)
    assert said.count("refused: this Trainer is that of ") == 2 - ("other," not in imports)
    assert "whose classes are unrelated" in said


@pytest.mark.parametrize("name", ["lightning_holmes", "an_alias"])
def test_a_package_that_is_imported_again_registers_nothing_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (pl.core.saving, torch_io):
        monkeypatch.setattr(place, "pl_load", place.pl_load)  # type: ignore[attr-defined]  # it is wrapped again
    spec = importlib.util.spec_from_file_location(name, PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    introduce(type("HolmesStrategy", (lightning_holmes.HolmesStrategy,), {}))  # that of a module which was reloaded
    trainer = pl.Trainer(strategy="holmes", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy) is lightning_holmes.HolmesStrategy


def test_lightning_is_imported_in_one_file() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "lightning_package.py":
            for node in ast.walk(parsed(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    origin = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                    assert (origin or "").split(".")[0] not in ("lightning", "lightning_fabric", "pytorch_lightning"), (
                        path
                    )
