"""What a microbatch's loss is multiplied by, so that gradients that are summed over microbatches and replicas are those of the mean.

finish = start_loss_scales([3.0, 3.0, 1.0], replicas, device, accumulated=1, factor=lambda: 1.0)
finish()                        # [3/7, 3/7, 1/7] where this is the only replica
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def start_loss_scales(
    weights: Sequence[float],
    replicas: dist.ProcessGroup | None,
    device: torch.device,
    *,
    accumulated: int,
    factor: Callable[[], float],
) -> Callable[[], list[float]]:
    """Each microbatch's share of the mean over all samples of a batch, all replicas and ``accumulated`` batches, times ``factor()``.

    The ranks of the last stage call, all together; what is returned waits for the other replicas.

    Args:
        weights: samples of each microbatch, or whatever its loss is a mean over.
        replicas: a group of them in which nothing else runs meanwhile; None: there is one.
    """
    total = torch.tensor([sum(weights)], dtype=torch.float64, device=device)
    work = None if replicas is None else dist.all_reduce(total, group=replicas, async_op=True)

    def finish() -> list[float]:
        if work is not None:
            work.wait()
        samples = float(total.item())
        if samples == 0:
            return [0.0 for _ in weights]
        scale = factor()
        return [weight / samples / accumulated * scale for weight in weights]

    return finish
