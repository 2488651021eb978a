"""Gradient synchronisation: sums a rank's gathered gradients with those of its replicas and of other stages.

This version reduces after the backward; ``start_grad_sync`` and ``finish_grad_sync`` are the seam at which
a later one overlaps.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from lightning_holmes.optim.grad_buffer import GradBuffer


class GradSync:
    """All-reduces ``buffer`` over ``data_parallel_group`` and shared parameters over their stages.

    Args:
        buffer: the rank's gradients; loss weights already divide by the samples of all replicas, so sums
            are what is wanted.
        data_parallel_group: the ranks with the same stages; None if there is one replica.
        shared_groups: for each set of ranks of one pipeline that hold copies of the same parameters, the
            group and the names, in the same order on all of them.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        data_parallel_group: dist.ProcessGroup | None,
        shared_groups: Mapping[dist.ProcessGroup, list[str]] | None = None,
    ) -> None:
        self._buffer = buffer
        self._group = data_parallel_group
        self._shared = dict(shared_groups or {})
        self._works: list[dist.Work] = []

    def start_grad_sync(self) -> None:
        """Start the reductions; all ranks of the groups must call, once a window."""
        self._buffer.seal()
        for group, names in self._shared.items():
            for name in names:
                for part in (self._buffer.gradient(name), self._buffer.flag(name)):
                    if part is not None:
                        dist.all_reduce(part, group=group)
        if self._group is not None:
            for tensor in (*(bucket.buffer for bucket in self._buffer.buckets), self._buffer.flags):
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
                if work is not None:
                    self._works.append(work)

    def finish_grad_sync(self) -> None:
        """Wait until the gradients are fully reduced."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def sum_over_replicas(self, value: float, device: torch.device) -> float:
        """``value`` summed over the replicas; every rank of the data-parallel group must call."""
        if self._group is None:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self._group)
        return float(total.item())
