"""Norm and clipping of a whole model's gradient when its parameters are spread over stages, tensor groups and replicas."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.torch_private import multiply_all


def norm_over_groups(
    gradients: Sequence[Tensor], groups: Sequence[dist.ProcessGroup | None], device: torch.device
) -> Tensor:
    """Return the 2-norm of the ``gradients`` of all ranks of all ``groups``; a scalar, the same on all of them. Across ranks each
    element must be passed once. All ranks of the groups must call."""
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
    if all(group is None for group in groups):
        return norm
    squared = norm.to(device, torch.float64 if device.type == "cpu" else torch.float32).square()
    for group in groups:
        if group is not None:
            dist.all_reduce(squared, group=group)
    return squared.sqrt().float()


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale ``gradients``, given the 2-norm ``norm`` of all gradients, so that it becomes at most ``max_norm``, as torch does."""
    multiply_all(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
