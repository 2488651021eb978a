"""Norm and clipping of a whole model's gradient when its parameters are spread over stages and tensor groups."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.torch_private import clamp_all, multiply_all


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    *,
    counts: Callable[[nn.Parameter], bool],
    pipeline_group: dist.ProcessGroup | None,
    device: torch.device,
    tensor_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients of the model; a scalar, the same on every rank.

    Args:
        parameters: the parameters of this rank.
        counts: whether this rank's copy of a parameter is the one that counts (shared parameters count once).
        pipeline_group: the ranks of this pipeline, all of which must call; None if there is one stage.
        tensor_group: the ranks that share the layers of this stage, all of which must call, or None: all parts of a sharded
            parameter count, and copies of a parameter count once.
    """
    first = tensor_group is None or dist.get_rank(tensor_group) == 0
    gradients = [
        dtensor.local_part(p.grad)
        for p in parameters
        if p.grad is not None and counts(p) and (first or dtensor.is_split(p))
    ]
    return norm_over_groups(gradients, (pipeline_group, tensor_group), device)


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


def clip_by_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of ``parameters`` to a norm of at most ``max_norm``, given their 2-norm ``norm``, as torch does."""
    if not any(map(dtensor.is_dtensor, parameters)):
        if parameters:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    clip_parts_by_norm(_gradient_parts(parameters), max_norm, norm)


def clip_by_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Clamp the elements of the gradients of ``parameters`` to within ``max_value``, as torch does."""
    clip_parts_by_value(_gradient_parts(parameters), max_value)


def clip_parts_by_norm(parts: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, given the 2-norm ``norm`` of all gradients, so that it becomes at most ``max_norm``, as torch does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    multiply_all(list(parts), factor)


def clip_parts_by_value(parts: Iterable[Tensor], max_value: float) -> None:
    """Clamp the elements of gradients to within ``max_value``, as torch does."""
    clamp_all(list(parts), max_value)


def _gradient_parts(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [dtensor.local_part(p.grad) for p in parameters if p.grad is not None]
