"""HostMemory: where tensors of a device pass between it and a socket.

    memory = HostMemory(device)                     # of one thread, which runs in a stream of its own on CUDA (comm/queue.py)
    with memory.receiving(buffers) as hosts:        # the same tensors where they lie on the host already
        link.ask({...}, into=hosts)
    hosts = memory.sending(buffers)

Two pieces of pinned memory take turns, as large as what was asked for: what has come is copied while the next comes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.optim.stage_buffers import Sizes, cut, num_bytes

_HOST = torch.device("cpu")


class HostMemory:
    """For tensors of ``device``. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[Any] = [None, None]  # when the last copy from there is done
        self._turn = 0

    @contextmanager
    def receiving(self, buffers: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Tensors on the host, whose values are in ``buffers`` for whatever the current stream does after this."""
        if not _passes(self._device):
            yield buffers
            return
        hosts = self._take(buffers)
        yield hosts
        _copy(hosts, buffers)
        if self._device.type == "cuda":
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()

    def sending(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """The values of ``buffers`` on the host, until the next but one is asked for."""
        if not _passes(self._device):
            return buffers
        hosts = self._take(buffers)
        _copy(buffers, hosts)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return hosts

    def _take(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        self._turn = 1 - self._turn
        copied, self._copied[self._turn] = self._copied[self._turn], None
        if copied is not None:
            copied.synchronize()
        sizes: Sizes = [(buffer.numel(), buffer.dtype) for buffer in buffers]
        if self._memory[self._turn].numel() < num_bytes(sizes):
            pinned = self._device.type == "cuda"
            self._memory[self._turn] = torch.empty(num_bytes(sizes), dtype=torch.uint8, pin_memory=pinned)
        return cut(self._memory[self._turn], sizes)


def _passes(device: torch.device) -> bool:
    return device != _HOST


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
