"""HostMemory: host buffers through which tensors pass between a device and a socket.

    memory = HostMemory(device)                     # of one thread, which runs in a stream of its own on CUDA (comm/queue.py)
    with memory.receiving(buffers) as hosts:        # hosts are the buffers themselves if these are on the host
        link.ask({...}, into=hosts)
    hosts = memory.start_copying(buffers)
    memory.wait()

There are two pieces of pinned memory, used in turn, as large as the largest request: one is copied while the other is filled. Reserve them
before the first step: to pin memory CUDA may wait for the device, and so for the peer of a posted receive.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.optim.stage_buffers import Sizes, cut, num_bytes

_HOST = torch.device("cpu")


class HostMemory:
    """Host buffers for tensors of ``device``. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[Any] = [None, None]  # CUDA events: the last copy from each piece is done
        self._turn = 0

    def reserve(self, requests: Iterable[Sizes]) -> None:
        """Allocate the memory for requests up to these."""
        if self.copies:
            largest = max(map(num_bytes, requests), default=0)
            self._memory = [self._allocate(largest) for _ in self._memory]

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    @contextmanager
    def receiving(self, buffers: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield tensors on the host to fill; on exit their values are copied to ``buffers`` in the current stream."""
        if not self.copies:
            yield buffers
            return
        hosts = self._take(buffers)
        yield hosts
        self._copy(hosts, buffers)

    @property
    def copies(self) -> bool:
        """Whether tensors pass through host memory: they are not on the host themselves."""
        return self._device != _HOST

    def start_copying(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Start to copy ``buffers`` to the host; the copies may be read after :meth:`wait`, until the second request after this one."""
        hosts = self._take(buffers)
        self._copy(buffers, hosts)
        return hosts

    def wait(self) -> None:
        """Wait on the host until the last copy is done."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()

    def _take(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        self._turn = 1 - self._turn
        self.wait()
        self._copied[self._turn] = None
        sizes: Sizes = [(buffer.numel(), buffer.dtype) for buffer in buffers]
        if self._memory[self._turn].numel() < num_bytes(sizes):
            self._memory[self._turn] = self._allocate(num_bytes(sizes))
        return cut(self._memory[self._turn], sizes)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()
