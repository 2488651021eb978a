"""A GradScaler for gradients that are not all plain tensors of this process. torch's unscales DTensors and plain tensors in one operator, which
accepts no mixture, and finds no gradients if optimizer nodes hold them.

with unscaling_parts(scaler): ...
with unscaling_on_nodes(scaler, host.unscale, device): ...
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.replacements import Replacements

_Groups = list[list[nn.Parameter]]


def unscaling_parts(scaler: Any) -> AbstractContextManager[None]:
    """Inside, ``scaler.unscale_`` unscales this rank's parts of gradients. Before that, ranks agree on whether there was an overflow
    (optim/loss_scale.py)."""
    return _unscaling(scaler, lambda groups: [[_part(parameter) for parameter in group] for group in groups])


def unscaling_on_nodes(
    scaler: Any, unscale: Callable[[float], bool], device: torch.device
) -> AbstractContextManager[None]:
    """Inside, ``scaler.unscale_`` calls ``unscale`` with the factor. If that returns True, for an overflow, the scaler skips the step, so that the
    nodes do not step, and lowers the scale. ``device``: the device of the scale."""

    def shown(groups: _Groups) -> _Groups:
        told = nn.Parameter(torch.zeros(1, device=device))
        told.grad = torch.full_like(told, float("inf") if unscale(1.0 / scaler.get_scale()) else 0.0)
        return [[told], *groups[1:]]

    return _unscaling(scaler, shown)


@contextmanager
def _unscaling(scaler: Any, stand_ins: Callable[[_Groups], _Groups]) -> Iterator[None]:
    """Inside, ``scaler.unscale_`` finds what ``stand_ins`` returns in place of the parameters of each group."""
    own = scaler.unscale_

    def unscale_(optimizer: Optimizer) -> None:
        held = [group["params"] for group in optimizer.param_groups]
        try:
            for group, parameters in zip(optimizer.param_groups, stand_ins(held), strict=True):
                group["params"] = parameters
            own(optimizer)
        finally:
            for group, parameters in zip(optimizer.param_groups, held, strict=True):
                group["params"] = parameters

    with Replacements() as run:
        run.replace(scaler, unscale_=unscale_)
        yield


def _part(parameter: nn.Parameter) -> nn.Parameter:
    if not dtensor.is_dtensor(parameter):
        return parameter
    part = nn.Parameter(dtensor.local_part(parameter).detach(), requires_grad=False)
    part.grad = None if parameter.grad is None else dtensor.local_part(parameter.grad)
    return part
