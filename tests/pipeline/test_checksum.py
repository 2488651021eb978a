"""Values on an accelerator are compared later, everything else at once; a CPU stands for the accelerator here."""

import pytest
import torch

from lightning_holmes.pipeline import checksum
from lightning_holmes.pipeline.checksum import Checksum


def test_values_of_an_accelerator_are_told_apart_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "is_on_host", lambda tensor: tensor.dtype == torch.int64)
    batch = {"x": torch.arange(6.0), "y": torch.arange(3)}
    same, swapped = Checksum(batch), Checksum({"x": batch["x"].flip(0), "y": batch["y"]})
    assert same.has_values and same.known == swapped.known and same.values() != swapped.values()
    assert same.values() == Checksum({"x": torch.arange(6.0), "y": torch.arange(3)}).values()
    for other in ({"x": batch["x"], "y": batch["y"] + 1}, {"x": batch["x"][:5], "y": batch["y"]}):
        assert Checksum(other).known != same.known


def test_on_the_host_all_is_known_at_once() -> None:
    one, other = Checksum([torch.arange(6)]), Checksum([torch.arange(6).flip(0)])
    assert one.known != other.known and not one.has_values and one.values() == other.values()
