"""Factors of the microbatches' losses, so that gradients summed over microbatches and replicas are those of the mean
loss; and loss scaling for fp16 across the ranks that hold parts of a module: one scale, and agreement on overflows.

The scaler is the user's ``torch.amp.GradScaler``, or the one of ``precision="16-mixed"``. It checks this rank's
gradients only; if another stage, or another shard of a tensor, has an overflow, this rank writes an infinity into its own
gradients, so that all ranks skip the step and lower the scale.

    loss = loss * scale.factor()   # on the last stage
    scale.agree(parameters)        # after the reduction, before the scaler unscales
    finish = start_loss_scales([3.0, 3.0, 1.0], replicas, accumulated=1, factor=lambda: 1.0)
    finish()                       # [3/7, 3/7, 1/7] if this is the only replica
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError


class LossScale:
    """The scale of ``scaler`` (anything with ``get_scale``) and the agreement on overflow.

    Args:
        groups: the process groups over which ranks have different gradients (stages, a tensor group, replicas that each have a
            shard); all of their ranks must call :meth:`agree`. A None among them stands for no group.
    """

    def __init__(self, scaler: Any, groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        self._scaler = scaler
        self._groups = groups
        self._device = device

    def factor(self) -> float | Tensor:
        """Return the factor of the losses; on an accelerator a scalar tensor, without synchronising."""
        if self._device.type == "cpu":
            return float(self._scaler.get_scale())
        return cast(Tensor, self._scaler.scale(torch.ones((), dtype=torch.float64, device=self._device)))

    def agree(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Make every rank of the groups see an overflow if one of them has one; returns whether there was any.

        Raises:
            UnsupportedModuleError: a stage has no gradient at all, which a GradScaler does not allow.
        """
        gradients = [dtensor.local_part(p.grad) for p in parameters if p.grad is not None]
        filled = [gradient for gradient in gradients if gradient.numel()]
        finite = torch.nn.utils.get_total_norm(filled, math.inf).isfinite() if filled else torch.tensor(True)
        state = torch.zeros(2, device=self._device)  # an overflow anywhere; a stage without gradients
        if gradients:
            state[0] = 1.0 - finite.to(state)
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
        if overflow and filled and bool(finite):
            filled[0].view(-1)[:1].fill_(float("inf"))
        return bool(overflow)


def start_loss_scales(
    weights: Sequence[float],
    replicas: dist.ProcessGroup | None,
    *,
    accumulated: int,
    factor: Callable[[], float | Tensor],
) -> Callable[[], list[float | Tensor]]:
    """Start to compute the factor of each microbatch's loss: its share of the mean over all samples of a batch, all
    replicas and ``accumulated`` batches, times ``factor()``.

    All ranks of the last stage must call; the returned function waits for the other replicas.

    Args:
        weights: the samples of each microbatch, or the number of whatever its loss is a mean over.
        replicas: a host (CPU) group of the replicas, in which nothing else runs meanwhile, so that no device is waited
            for; None: there is one replica.
    """
    total = torch.tensor([sum(weights)], dtype=torch.float64)
    work = None if replicas is None else dist.all_reduce(total, group=replicas, async_op=True)

    def finish() -> list[float | Tensor]:
        if work is not None:
            work.wait()
        samples, scale = sum(weights) if replicas is None else float(total.item()), factor()
        return [weight / samples / accumulated * scale if weight else 0.0 for weight in weights]

    return finish
