"""Fits with fewer bits between clusters: weights near those of an exact fit, and not equal, since then nothing would be
rounded; and the same on both ranks."""

import pytest
import torch
from launch import launch
from rounding_cases import ROWS

from lightning_holmes.comm.collectives import COMPRESSIONS, sum_rounded


def test_rounded_fits_train_nearly_alike() -> None:
    ranks = launch(2, "rounding_cases:train_all", None, timeout_s=150)
    for name in ROWS:
        exact = ranks[0][f"{name.split(',')[0]}, exact"]
        for found in ranks:
            for key, value in found[name].items():
                torch.testing.assert_close(value, exact[key], rtol=0, atol=5e-3, msg=f"{name}: {key}")
                assert torch.equal(value, ranks[0][name][key]), (name, key)
        same = all(torch.equal(value, exact[key]) for key, value in ranks[0][name].items())
        assert same == name.endswith("exact"), name


@pytest.mark.parametrize("dtype", COMPRESSIONS.values())
def test_what_is_as_narrow_is_summed_as_it_is(dtype: torch.dtype) -> None:
    summed: list[torch.Tensor] = []
    for tensor in (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1 / 3)):
        sum_rounded(tensor, dtype, summed.append)
    assert summed[0].dtype == torch.bfloat16 and summed[1].dtype == dtype
    assert tensor.tolist() == summed[1].tolist() != [1 / 3] * 3
