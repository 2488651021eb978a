"""ShardMemory: holds the values and gradients of a sharded optimizer's pieces.

There are two kinds: with :class:`ReplicatedMemory` every replica holds whole parameters in flat buffers, and updated pieces are
gathered after a step (ZeRO stage 1); with StageShards (stage_shards.py) a replica holds its pieces only.

    memory = ReplicatedMemory(buffer, group, queue, gather=collective.gather, lazily=True)
    pieces = memory.lay_out(by_elements=True)          # the pieces of all replicas
    memory.values(piece)                               # (piece.numel,), in the parameter's own memory
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm.queue import CommQueue
from lightning_holmes.optim.grad_buffer import Bucket, GradBuffer
from lightning_holmes.optim.param_gather import ParameterGather
from lightning_holmes.optim.shards import Extent, Piece, cut_by_elements, cut_by_parameters


class ShardMemory(Protocol):
    """The memory of one sharded optimizer; all replicas must create one, with equal arguments, and call its methods together."""

    @property
    def is_whole(self) -> bool:
        """Whether every replica holds whole parameters, of which pieces are views."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters, by name; their values may be elsewhere."""

    @property
    def generation(self) -> int:
        """A counter that changes when pieces have to be laid out anew."""

    def lay_out(self, *, by_elements: bool) -> list[Piece]:
        """Cut the parameters by elements, or assign whole ones; returns the pieces of all replicas, in the same order on all."""

    def values(self, piece: Piece) -> Tensor:
        """Return the values of one of this rank's pieces, (piece.numel,), in memory that the optimizer may write to."""

    def gradient(self, piece: Piece) -> Tensor:
        """Return the reduced gradient of one of this rank's pieces, (piece.numel,)."""

    def watch(self, module: nn.Module) -> None:
        """Make ``module``'s submodules wait for their parameters before they run."""

    def adopt(self) -> None:
        """Take over parameters whose ``data`` was replaced."""

    def start(self) -> None:
        """Start to distribute this rank's updated pieces, after an optimizer step."""

    def finish(self) -> None:
        """Wait until all parameters have arrived."""

    def abandon(self) -> None:
        """Stop waiting for transfers that are under way."""

    def close(self) -> None:
        """Give each parameter memory of its own again."""


class ReplicatedMemory:
    """Whole parameters on every replica, with the layout of their gradients.

    Args:
        buffer: the gradients, whose buckets are laid out already.
        group: the replicas, for collectives in the queue; None: there is one.
        queue: runs the gathering of parameters.
        gather: all-gathers a flat tensor of which each rank holds its part; called in the queue.
        lazily: gather while the next forward runs.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        group: dist.ProcessGroup | None,
        queue: CommQueue,
        *,
        gather: Callable[[Tensor], None],
        lazily: bool,
    ) -> None:
        self._buffer, self._group, self._queue = buffer, group, queue
        self._gather_parts, self._lazily = gather, lazily
        self._gather: ParameterGather | None = None
        self._watched: nn.Module | None = None

    is_whole = True

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._buffer.parameters

    @property
    def generation(self) -> int:
        return self._buffer.generation

    def lay_out(self, *, by_elements: bool) -> list[Piece]:
        self.close()
        extents = [_extent(bucket) for bucket in self._buffer.buckets]
        cut = cut_by_elements if by_elements else cut_by_parameters
        pieces = cut(extents, 1 if self._group is None else dist.get_world_size(self._group))
        self._gather = ParameterGather(
            self._buffer.parameters,
            extents,
            pieces,
            self._group,
            self._queue,
            gather=self._gather_parts,
            lazily=self._lazily,
        )
        if self._watched is not None:
            self._gather.watch(self._watched)
        return pieces

    def values(self, piece: Piece) -> Tensor:
        assert self._gather is not None
        return self._gather.buffers[piece.bucket][piece.offset : piece.offset + piece.numel]

    def gradient(self, piece: Piece) -> Tensor:
        return self._buffer.buckets[piece.bucket].buffer[piece.offset : piece.offset + piece.numel]

    def watch(self, module: nn.Module) -> None:
        self._watched = module
        assert self._gather is not None
        self._gather.watch(module)

    def adopt(self) -> None:
        assert self._gather is not None
        self._gather.adopt()

    def start(self) -> None:
        assert self._gather is not None
        self._gather.start()

    def finish(self) -> None:
        if self._gather is not None:
            self._gather.finish()

    def abandon(self) -> None:
        if self._gather is not None:
            self._gather.abandon()

    def close(self) -> None:
        if self._gather is not None:
            self._gather.close()
            self._gather = None


def _extent(bucket: Bucket) -> Extent:
    sizes = tuple(bucket.views[name].numel() for name in bucket.names)
    return Extent(names=bucket.names, sizes=sizes, numel=bucket.buffer.numel())
