"""Checksums of batches: whether two ranks hold the same samples, without exchanging the samples.

The checksum of the structure and of what is on the host is known at once. Tensors on an accelerator are summed there,
and the sums are copied to the host asynchronously, so that reading them after a step does not stall it.

    mine = Checksum(batch)
    mine.known              # compared before the step
    mine.values()           # compared after it
"""

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import CONSTANTS, signature


class Checksum:
    """The checksum of one batch, computed on the devices where its tensors are; sparse and quantized tensors are left out."""

    known: int
    """CRC-32 of the structure, the constants, and the tensors on the host."""

    def __init__(self, batch: Any) -> None:
        known = zlib.crc32(repr((signature(batch), _constants_of(batch))).encode())
        sums = []
        for _, tensor in tree.named_tensors(batch, "batch"):
            if tensor.is_sparse or tensor.is_quantized or tensor.numel() == 0:
                continue
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if not is_on_host(tensor):
                sums.append(_sums_of(data))
            else:
                known = zlib.crc32(data.numpy().data, known)
        self.known = zlib.crc32(str(len(sums)).encode(), known)
        self._sums = _Arriving(torch.stack(sums)) if sums else None

    @property
    def has_values(self) -> bool:
        """Whether the batch has tensors on an accelerator, which :meth:`values` compares."""
        return self._sums is not None

    def values(self) -> int:
        """The checksum of the tensors on an accelerator; waits for their sums, but not for later work on the device."""
        return 0 if self._sums is None else zlib.crc32(self._sums.read().numpy().data)


class _Arriving:
    """A tensor that is being copied from an accelerator to the host."""

    def __init__(self, tensor: Tensor) -> None:
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._host.copy_(tensor, non_blocking=True)
        self._event: Any = None
        if pinned:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is on the CPU, so that reading its values does not wait for an accelerator."""
    return tensor.device.type == "cpu"


def _sums_of(data: Tensor) -> Tensor:
    """Two wrapping sums of the data, as int64 of shape (2,); the second one weights each word by its position."""
    aligned = data.numel() % 4 == 0 and data.storage_offset() % 4 == 0
    words = data.view(torch.int32) if aligned else data
    places = torch.arange(words.numel(), device=words.device) % 65521 + 1
    return torch.stack([words.sum(dtype=torch.int64), (words * places).sum(dtype=torch.int64)])


def _constants_of(value: Any, seen: set[int] | None = None) -> Any:
    """The strings, numbers and NumPy arrays of a batch, in order; of an object its class and, once, its contents."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor) or id(value) in seen:
        return None
    if tree.is_object(value):
        seen.add(id(value))
    if tree.is_container(value) or tree.is_object(value):
        return type(value).__name__, [(str(key), _constants_of(child, seen)) for key, child in tree.children_of(value)]
    if isinstance(value, np.ndarray):
        return value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()) if value.dtype != object else 0
    return value if isinstance(value, CONSTANTS) else type(value).__name__
