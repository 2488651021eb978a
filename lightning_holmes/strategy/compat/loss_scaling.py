"""A GradScaler beside sharded parameters: torch's unscales DTensors and plain tensors in one operator, which takes no mixture.

with unscaling_parts(scaler): ...
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.strategy.compat.replacements import Replacements


@contextmanager
def unscaling_parts(scaler: Any) -> Iterator[None]:
    """Inside, ``scaler.unscale_`` goes over the parts of gradients on this rank. Ranks agree on an overflow before
    (optim/loss_scale.py)."""
    own = scaler.unscale_

    def unscale_(optimizer: Optimizer) -> None:
        held = [group["params"] for group in optimizer.param_groups]
        try:
            for group, parameters in zip(optimizer.param_groups, held, strict=True):
                group["params"] = [_part(parameter) for parameter in parameters]
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
