"""StageBuffers: two buffers that the stages of a rank use in turn, each as large as the largest stage that uses it.

A stage uses the same buffer in its forward and its backward.

    buffers = StageBuffers({0: [(10, torch.float32)], 1: [(3, torch.bfloat16), (4, torch.float32)]}, torch.device("cpu"))
    first, second = buffers.of(1)                   # (3,) and (4,), in the memory of the second buffer
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NUM_BUFFERS = 2
_ALIGNED = 256  # bytes to which each tensor's start is aligned: a view of another type needs a multiple of its size

Sizes = Sequence[tuple[int, torch.dtype]]
"""The number of elements and the type of each tensor in a buffer."""


class StageBuffers:
    """Buffers that the stages use in turn.

    Args:
        sizes: the tensors of each stage, in the order in which the stages take turns.

    Attributes:
        places: the index of the buffer of each stage.
    """

    def __init__(self, sizes: Mapping[int, Sizes], device: torch.device) -> None:
        self._sizes = dict(sizes)
        self.places = {stage: index % NUM_BUFFERS for index, stage in enumerate(sizes)}
        most = [0] * NUM_BUFFERS
        for stage, place in self.places.items():
            most[place] = max(most[place], num_bytes(sizes[stage]))
        self._memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in most]

    def of(self, stage: int) -> list[Tensor]:
        """Return the tensors of a stage, 1-D; they share memory with those of the other stages that use the same buffer."""
        return cut(self._memory[self.places[stage]], self._sizes[stage])


def allocate(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Return tensors of ``sizes`` in newly allocated memory, uninitialised."""
    return cut(torch.empty(num_bytes(sizes), dtype=torch.uint8, device=device), sizes)


def num_bytes(sizes: Sizes) -> int:
    """Return the bytes that tensors of ``sizes`` take side by side, with alignment."""
    return sum(-(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED for numel, dtype in sizes)


def cut(memory: Tensor, sizes: Sizes) -> list[Tensor]:
    """Return tensors of ``sizes`` side by side in ``memory``, uint8."""
    found, start = [], 0
    for numel, dtype in sizes:
        size = numel * dtype.itemsize
        found.append(memory[start : start + size].view(dtype))
        start += -(-size // _ALIGNED) * _ALIGNED
    return found
