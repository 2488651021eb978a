"""Loss scaling for 16-bit floats across the ranks that hold a module together: one scale, and one verdict on overflow.

The scaler is the user's, ``torch.amp.GradScaler`` or what ``precision="16-mixed"`` makes. It looks at this rank's
gradients only; an overflow on another stage, or in another part of a sharded tensor, is shown to it as one here, so that
all skip the step and lower the scale.

    losses are multiplied by scale.factor() on the last stage
    scale.agree(parameters)        # after the reduction, before the scaler unscales
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError


class LossScale:
    """The scale of ``scaler`` (anything with ``get_scale``) and the agreement on overflow.

    Args:
        groups: over which ranks see different gradients (stages, a tensor group, replicas of which each has a share); all
            of them call :meth:`agree`. None: there is no such group.
    """

    def __init__(self, scaler: Any, groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        self._scaler = scaler
        self._groups = groups
        self._device = device

    def factor(self) -> float | Tensor:
        """What losses are multiplied by; on an accelerator a scalar there, which nobody waits for."""
        if self._device.type == "cpu":
            return float(self._scaler.get_scale())
        return cast(Tensor, self._scaler.scale(torch.ones((), dtype=torch.float64, device=self._device)))

    def agree(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Let every stage see an overflow where one stage has one; whether there was any.

        Raises:
            UnsupportedModuleError: this stage has no gradient at all, with which a scaler cannot work.
        """
        found = [dtensor.local_part(p.grad) for p in parameters if p.grad is not None]
        gradients = [g for g in found if g.numel()] or found
        finite = [gradient.isfinite().all() for gradient in gradients]
        state = torch.zeros(2, device=self._device)  # an overflow anywhere; a stage without gradients
        if finite:
            state[0] = 1.0 - torch.stack(finite).all().to(torch.float32)
        else:
            state[1] = 1.0
        for group in self._groups:
            if group is not None:
                dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
        overflow, without = state.tolist()
        if without:
            raise UnsupportedModuleError(
                "a stage of the pipeline has no gradient (all its parameters are frozen), and the GradScaler of "
                'precision="16-mixed" needs one on every stage: use bf16-mixed, or a partition with some trained layer on '
                "each stage"
            )
        if overflow and bool(torch.stack(finite).all()):
            gradients[0].view(-1)[:1].fill_(float("inf"))
        return bool(overflow)
