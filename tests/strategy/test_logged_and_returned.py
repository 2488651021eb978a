"""Values that a step logs or returns and that are no means over samples: with every option at its default, those of plain Lightning.

Baseline: plain Lightning in this process. Tolerance: 1e-5 relative (fp32).
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import f1_score, pearson_corrcoef

from lightning_holmes import HolmesStrategy


class Net(ByGradient):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, 3)
        self.rows: list[dict[str, float]] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y, t = batch
        out = self.head(self.layers(x))
        loss = F.cross_entropy(out, y)
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp(), "val_rmse": F.mse_loss(out[:, 0], t).sqrt()})
        self.log_dict({"val_tokens": (y > 0).sum().float(), "val_greatest": out.max()})

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        row = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.rows.append(row | {f"part {n}": float(part) for n, part in enumerate(outputs.get("parts", []))})


class Logging(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, t = batch
        out = self.head(self.layers(x))
        mse = F.mse_loss(out[:, 0], t)
        loss = F.cross_entropy(out, y) + mse
        self.log("loss", loss)
        self.log("rmse", mse.sqrt())
        self.log("f1", f1_score(out.argmax(1), y, task="multiclass", num_classes=3, average="macro"))
        self.log("tokens", (y > 0).sum().float())
        self.log("samples", float(len(x)))
        self.log("greatest", out.max())
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("pearson", pearson_corrcoef(out[:, 0], t))
        return loss


class Returning(Net):
    """Returns the parts of its loss as one tensor of two entries."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y, _ = batch
        out = self.head(self.layers(x))
        parts = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        return {"loss": parts.sum(), "parts": parts.detach()}


def fit(made: type[Net], strategy: Any, **options: Any) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    draw = torch.Generator().manual_seed(1)
    x, t = torch.randn(16, 16, generator=draw), torch.randn(16, generator=draw)
    data = TensorDataset(x, torch.randint(0, 3, (16,), generator=draw), t)
    module = made()
    quiet_trainer(strategy, max_epochs=2, **options).fit(module, *[DataLoader(data, batch_size=8)] * 2)
    return {"rows": module.rows, "weights": module.state_dict()}


def fit_both(_: Any) -> dict[str, Any]:
    halves = {"pipeline_parallel_size": 2, "eval_num_microbatches": 2}
    return {made.__name__: fit(made, HolmesStrategy(**halves), devices=2) for made in (Logging, Returning)}


@pytest.fixture(scope="module")
def staged() -> dict[str, Any]:
    return launch(2, "test_logged_and_returned:fit_both")[0]


@pytest.mark.xdist_group("logged and returned")
@pytest.mark.parametrize("made", [Logging, Returning])
def test_equal_to_plain_lightning(made: type[Net], staged: dict[str, Any]) -> None:
    torch.testing.assert_close(staged[made.__name__], fit(made, "auto"), rtol=1e-5, atol=1e-6)
