"""Placeholders for parameters whose values are elsewhere: shape and dtype, and NaN in the memory of one element."""

import torch
from torch import Tensor


def placeholder(like: Tensor) -> Tensor:
    """A tensor of ``like``'s shape, dtype and device that holds NaN (zero if the dtype has none) in the memory of one element."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
