"""What no splitting can make exact is found by trying, and named."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_holmes
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.batch_dependence import describe_batch_dependence


class Classifier(LightningModule):
    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), *extra, nn.Linear(4, 3))

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])


class Contrastive(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        z = F.normalize(self.layers(batch["x"]), dim=-1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class TokenMean(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"], ignore_index=0)


class WeightedTokenMean(TokenMean):
    def microbatch_weight(self, batch: Any) -> Tensor:
        return (batch["y"] != 0).sum()


class Noisy(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        return self.layers(batch["x"] + torch.randn_like(batch["x"])).square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 4), "y": torch.tensor([1, 2, 1, 0, 0, 0, 1, 0])}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Classifier(), None),
        (Classifier(nn.Dropout(0.5)), None),
        (Classifier(nn.BatchNorm1d(4)), ["layers.1", "batch normalisation"]),
        (Contrastive(), ["Contrastive", "negatives", "microbatch_weight"]),
        (TokenMean(), ["TokenMean", "microbatch_weight"]),
        (WeightedTokenMean(), None),
        (Noisy(), None),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, LightningModule) else None,
)
def test_losses_that_depend_on_company_are_named(module: LightningModule, words: list[str] | None) -> None:
    reason = describe_batch_dependence(module, batch(), (), BatchSplitter())
    assert (reason is None) == (words is None), reason
    assert all(word in str(reason) for word in words or [])


def test_check_tells_it_as_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    report = lightning_holmes.check(Contrastive(), batch())
    report.print()
    assert report.ok and len(report.notes) == 1
    assert "negatives" in capsys.readouterr().out
