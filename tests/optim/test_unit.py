"""Units, at the borders of the pieces in which their elements are rounded and compared."""

import pytest
import torch

from lightning_holmes.optim import unit as units
from lightning_holmes.optim.unit import adopt, side_by_side


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 100])
def test_a_gradient_is_rounded_in_its_own_memory(
    dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_CHUNK", 8)
    unit = side_by_side({"a": torch.empty(numel, device="meta")}, multiple_of=1)
    unit.dtype, unit.gradient = dtype, torch.randn(numel)
    expected, memory = unit.gradient.to(dtype), unit.gradient.untyped_storage().data_ptr()
    for _ in range(2):
        unit.round_gradient()
        assert unit.gradient.dtype == dtype and torch.equal(unit.gradient, expected)
        assert unit.gradient.untyped_storage().data_ptr() == memory


def test_masters_take_over_what_was_written_and_keep_their_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_CHUNK", 8)
    master = torch.randn(100)
    now, expected = master.bfloat16(), master.clone()
    now[::7] = torch.arange(15).bfloat16() + 100
    expected[::7] = torch.arange(15).float() + 100
    adopt(master, now)
    assert torch.equal(master, expected)
