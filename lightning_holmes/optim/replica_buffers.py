"""Buffers of replicas: before a step all replicas take those of one of them, as torch's DistributedDataParallel does.

Running means, codebooks and centres are changed by each replica with its own samples. DDP (``broadcast_buffers``) broadcasts
the buffers of its first rank before each forward that follows one with a reduction of gradients; so does this module.

    buffers = ReplicaBuffers(groups.data_parallel, groups.replicas_on_host, source=0)
    buffers.align(tensors)      # every replica must call, with its own tensors in the same order
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm import dtensor


class ReplicaBuffers:
    """Broadcasts the buffers of one replica to the others.

    Args:
        group: the replicas, for tensors on the device of its backend; None: there is one replica, and nothing is sent.
        on_host: the same ranks, for tensors on the host.
        source: the rank in ``group`` whose buffers the others take.
    """

    def __init__(self, group: dist.ProcessGroup | None, on_host: dist.ProcessGroup | None, *, source: int) -> None:
        self._group, self._on_host, self._source = group, on_host, source

    @property
    def has_others(self) -> bool:
        """Whether there is more than one replica."""
        return self._group is not None

    @torch.no_grad()
    def align(self, buffers: Iterable[Tensor]) -> None:
        """Overwrite ``buffers`` with those of the source, in one message for each device. Every replica must call."""
        by_device: dict[str, list[Tensor]] = {}
        for buffer in buffers:
            part = dtensor.local_part(buffer).detach()
            if part.numel() and part.layout is torch.strided and part.device.type != "meta":
                by_device.setdefault(part.device.type, []).append(part)
        for device, parts in sorted(by_device.items()):
            group = self._on_host if device == "cpu" else self._group
            sent = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
            dist.broadcast(sent, group=group, group_src=self._source)
            if dist.get_rank(group) == self._source:
                continue
            sizes = [part.numel() * part.element_size() for part in parts]
            for part, received in zip(parts, torch.split(sent, sizes), strict=True):
                aligned = received if received.storage_offset() % part.element_size() == 0 else received.clone()
                part.copy_(aligned.view(part.dtype).view(part.shape))
