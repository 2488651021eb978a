"""Part: parameters of one type that lie side by side and are gathered and reduced together, by stage_shards.py and layered.py.

part.views(buffer)["up.weight"]      # a parameter in a buffer of the part's size
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Parameters that lie side by side, and are gathered and freed together.

    Attributes:
        names, shapes, starts: for each parameter, its name, its shape and its first element in the part.
        numel: the number of elements with padding; a multiple of the number of replicas.
        stage: the stage that reads the parameters; None: several stages do, or a small one.
        ranks: the pipeline ranks that share the parameters; () if only one holds them.
        is_trained: whether a parameter had requires_grad when they were laid out, or later.
        shard: (numel / replicas,): this replica's shard of the values.
        gradient: (numel / replicas,): its shard of the reduced gradients of this window; None before the first reduction.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    stage: int | None
    ranks: tuple[int, ...]
    is_trained: bool
    shard: Tensor
    gradient: Tensor | None = None

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in ``buffer``, (numel,), by name."""
        return {
            name: buffer[start : start + shape.numel()].view(shape)
            for name, start, shape in zip(self.names, self.starts, self.shapes, strict=True)
        }

    def is_like(self, other: "Part") -> bool:
        """Whether ``other`` has the same parameters in the same layout."""
        return (self.names, self.starts, self.numel, self.dtype) == (
            other.names,
            other.starts,
            other.numel,
            other.dtype,
        )
