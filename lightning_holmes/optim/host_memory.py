"""HostMemory: host buffers through which tensors pass between a device and a socket.

    memory = HostMemory(device)                     # of one thread, which runs in a stream of its own on CUDA (comm/queue.py)
    hosts = memory.beside(buffers)                  # the buffers themselves if these are on the host
    memory.copy(hosts, buffers)                     # after hosts have been filled; or
    memory.copy(buffers, hosts)                     # before they are read, after memory.wait()

There are two pieces of pinned memory, used in turn, as large as the largest request: one is copied while the other is filled. Reserve them
before the first step: to pin memory CUDA may wait for the device, and so for the peer of a posted receive.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.optim.stage_buffers import Sizes, cut, num_bytes

_HOST = torch.device("cpu")


class HostMemory:
    """Host buffers for tensors of ``device``. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [torch.empty(0, dtype=torch.uint8)] * 2  # the one of the last request first
        self._copied: Any = None  # a CUDA event: the last copy is done

    @property
    def copies(self) -> bool:
        """Whether tensors pass through host memory: they are not on the host themselves."""
        return _passes(self._device)

    def reserve(self, requests: Iterable[Sizes]) -> None:
        """Allocate the memory for requests up to these."""
        if self.copies:
            largest = max(map(num_bytes, requests), default=0)
            self._pieces = [self._allocate(largest) for _ in self._pieces]

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def beside(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors on the host for the contents of ``buffers``; their memory is used again by the second request after this one."""
        if not self.copies:
            return buffers
        sizes: Sizes = [(buffer.numel(), buffer.dtype) for buffer in buffers]
        self._pieces.reverse()
        if self._pieces[0].numel() < num_bytes(sizes):
            self._pieces[0] = self._allocate(num_bytes(sizes))
        return cut(self._pieces[0], sizes)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Start to copy between ``buffers`` and what :meth:`beside` has returned for them, in the current stream."""
        if not self.copies:
            return
        self.wait()  # the next request gets the memory of the copy before
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            self._copied = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait on the host until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()


def _passes(device: torch.device) -> bool:
    return device != _HOST
