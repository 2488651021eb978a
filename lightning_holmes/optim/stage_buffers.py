"""StageBuffers: two buffers that the stages of a rank take in turn, each as large as the largest stage that takes it.

A stage has the same one in its forward and its backward.

    buffers = StageBuffers({0: [(10, torch.float32)], 1: [(3, torch.bfloat16), (4, torch.float32)]}, torch.device("cpu"))
    first, second = buffers.of(1)                   # (3,) and (4,), in the memory of the second buffer
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NUM_BUFFERS = 2
_ALIGNED = 256  # bytes, between what lies side by side: a view of another type needs a multiple of its size

Sizes = Sequence[tuple[int, torch.dtype]]
"""Elements and type of each tensor that lies in a buffer."""


class StageBuffers:
    """``sizes``: by stage, in the order in which they take their turns; ``num_buffers``: with as many as stages each has its own."""

    def __init__(self, sizes: Mapping[int, Sizes], device: torch.device, *, num_buffers: int = NUM_BUFFERS) -> None:
        self._sizes = dict(sizes)
        self._places = {stage: index % num_buffers for index, stage in enumerate(sizes)}
        most = [0] * num_buffers
        for stage, place in self._places.items():
            most[place] = max(most[place], num_bytes(sizes[stage]))
        self._memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in most]

    def place(self, stage: int) -> int:
        """Which buffer a stage has."""
        return self._places[stage]

    def of(self, stage: int) -> list[Tensor]:
        """The tensors of a stage, 1-D; what the stage before the last one had there is overwritten with them."""
        return cut(self._memory[self._places[stage]], self._sizes[stage])


def allocate(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Such tensors in memory of their own."""
    return cut(torch.empty(num_bytes(sizes), dtype=torch.uint8, device=device), sizes)


def num_bytes(sizes: Sizes) -> int:
    """That they take, side by side."""
    return sum(-(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED for numel, dtype in sizes)


def cut(memory: Tensor, sizes: Sizes) -> list[Tensor]:
    """Such tensors side by side in ``memory``, uint8."""
    found, start = [], 0
    for numel, dtype in sizes:
        size = numel * dtype.itemsize
        found.append(memory[start : start + size].view(dtype))
        start += -(-size // _ALIGNED) * _ALIGNED
    return found
