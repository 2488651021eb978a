"""What stands for a parameter whose values are elsewhere: its shape and type, and NaN in one element's memory."""

import torch
from torch import Tensor


def placeholder(like: Tensor) -> Tensor:
    """A tensor of ``like``'s shape, type and device that holds NaN (zero where there is none) in one element's memory."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
