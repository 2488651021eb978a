"""What a microbatch's loss is multiplied by, so that gradients that are summed over microbatches and replicas are those of the mean.

finish = start_loss_scales([3.0, 3.0, 1.0], replicas, accumulated=1, factor=lambda: 1.0)
finish()                        # [3/7, 3/7, 1/7] where this is the only replica
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
    """Each microbatch's share of the mean over all samples of a batch, all replicas and ``accumulated`` batches, times ``factor()``.

    The ranks of the last stage call, all together; what is returned waits for the other replicas.

    Args:
        weights: samples of each microbatch, or whatever its loss is a mean over.
        replicas: a group of their hosts in which nothing else runs meanwhile, so that no device is waited for; None: there is
            one.
    """
    total = torch.tensor([sum(weights)], dtype=torch.float64)
    work = None if replicas is None else dist.all_reduce(total, group=replicas, async_op=True)

    def finish() -> list[float | Tensor]:
        if work is not None:
            work.wait()
        samples, scale = sum(weights) if replicas is None else float(total.item()), factor()
        return [weight / samples / accumulated * scale if weight else 0.0 for weight in weights]

    return finish
