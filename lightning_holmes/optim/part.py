"""Part: parameters of one type that lie side by side, and travel together; who cuts, brings and reduces them is stage_shards.py's and layered.py's.

part.views(buffer)["up.weight"]      # a parameter in a buffer of the part's size
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Parameters that lie side by side, and come and go together.

    Attributes:
        names, shapes, starts: of each parameter, and where it begins.
        numel: with padding; a multiple of the number of replicas.
        stage: the one that reads them; None: several do, or a small one does.
        ranks: the pipeline ranks that hold them, too; () where there are no others.
        is_trained: one of them has had requires_grad when they were laid out, or later.
        shard: (numel / replicas,): this replica's share of the values.
        gradient: likewise of the reduced gradients of this window; None before the first.
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
        """The parameters in ``buffer``, (numel,)."""
        return {
            name: buffer[start : start + shape.numel()].view(shape)
            for name, start, shape in zip(self.names, self.starts, self.shapes, strict=True)
        }

    def is_like(self, other: "Part") -> bool:
        """Whether the same parameters lie in the same way."""
        return (self.names, self.starts, self.numel, self.dtype) == (
            other.names,
            other.starts,
            other.numel,
            other.dtype,
        )
