"""The norm of a whole model's gradient when its parameters are spread over stages."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    *,
    counts: Callable[[nn.Parameter], bool],
    pipeline_group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The 2-norm of all gradients of the model; a scalar, the same on every rank.

    Args:
        parameters: this rank's.
        counts: whether this rank's copy of a parameter is the one that counts (shared ones count once).
        pipeline_group: the ranks of this pipeline, all of which must call; None if there is one stage.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and counts(p)]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
    if pipeline_group is None:
        return norm
    squared = norm.to(device, torch.float64 if device.type == "cpu" else torch.float32).square()
    dist.all_reduce(squared, group=pipeline_group)
    return squared.sqrt().float()
