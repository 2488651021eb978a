"""Functions that hooks of test_tripwires.py call from another file, as users keep them."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

TOOLS = {"norms": grad_norm}  # a function that no name at module level refers to


def clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


def norm_by_hand(parameters: Iterable[nn.Parameter]) -> float:
    gradients = [p.grad for p in parameters if getattr(p, "g" + "rad") is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def prune(module: nn.Module, share: float) -> None:
    """Set the given share of the smallest weights of the whole module to zero."""
    every = torch.cat([p.detach().abs().flatten() for p in module.parameters()])
    limit = every.kthvalue(int(share * every.numel())).values
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(parameter.abs() > limit)


def largest(module: nn.Module) -> Any:
    """Return the name and the size of the largest weight."""
    return max((float(p.abs().max()), n) for n, p in module.named_parameters())
