"""The verdict on overflow: all stages see an overflow that one stage sees; with a scaler of plain arithmetic and no
processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.loss_scale import LossScale


def parameter(*gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient) if gradient else None
    return made


def with_other_stage(monkeypatch: pytest.MonkeyPatch, overflow: float, without: float = 0.0) -> Any:
    """Return a group whose other rank reports this value."""

    def all_reduce(state: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        torch.maximum(state, torch.tensor([overflow, without]), out=state)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return object()


def scale(group: Any) -> LossScale:
    return LossScale(SimpleNamespace(get_scale=lambda: 8.0), (group, None), torch.device("cpu"))


def test_an_overflow_elsewhere_is_shown_to_the_scaler_here(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parameter(1.0, 2.0)
    assert scale(with_other_stage(monkeypatch, 1.0)).agree([mine])
    assert not torch.isfinite(mine.grad).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_here_is_told(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    assert scale(with_other_stage(monkeypatch, 0.0)).agree([parameter(1.0), parameter(bad, 2.0)])


def test_without_an_overflow_gradients_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parameter(1.0, 2.0)
    assert not scale(with_other_stage(monkeypatch, 0.0)).agree([mine])
    assert mine.grad is not None and mine.grad.tolist() == [1.0, 2.0]
    assert scale(None).factor() == 8.0


def test_a_stage_with_nothing_to_train_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModuleError, match="frozen"):
        scale(None).agree([parameter()])
    with pytest.raises(UnsupportedModuleError, match="frozen"):
        scale(with_other_stage(monkeypatch, 0.0, without=1.0)).agree([parameter(1.0)])
