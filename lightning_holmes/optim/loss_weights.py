"""Factors of the microbatches' losses, so that gradients summed over microbatches and replicas are those of the mean loss.

finish = start_loss_scales([3.0, 3.0, 1.0], replicas, accumulated=1, factor=lambda: 1.0)
finish()                        # [3/7, 3/7, 1/7] if this is the only replica
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def start_loss_scales(
    weights: Sequence[float],
    replicas: dist.ProcessGroup | None,
    *,
    accumulated: int,
    factor: Callable[[], float | Tensor],
) -> Callable[[], list[float | Tensor]]:
    """Start to compute the factor of each microbatch's loss: its share of the mean over all samples of a batch, all replicas and
    ``accumulated`` batches, times ``factor()``.

    All ranks of the last stage must call; the returned function waits for the other replicas.

    Args:
        weights: the samples of each microbatch, or the number of whatever its loss is a mean over.
        replicas: a host (CPU) group of the replicas, in which nothing else runs meanwhile, so that no device is waited for; None:
            there is one replica.
    """
    total = torch.tensor([sum(weights)], dtype=torch.float64)
    work = None if replicas is None else dist.all_reduce(total, group=replicas, async_op=True)

    def finish() -> list[float | Tensor]:
        if work is not None:
            work.wait()
        samples, scale = sum(weights) if replicas is None else float(total.item()), factor()
        return [weight / samples / accumulated * scale if weight else 0.0 for weight in weights]

    return finish
