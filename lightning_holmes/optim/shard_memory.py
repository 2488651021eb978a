"""ShardMemory: holds the values and gradients of a sharded optimizer's pieces.

There are two kinds: with :class:`ReplicatedMemory` every replica holds whole parameters in flat buffers with the layout of their
gradients, and updated pieces are gathered in place, bucket by bucket, while the next forward already runs (ZeRO stage 1); a read of a
parameter waits for its bucket (arriving.py). With StageShards (stage_shards.py) a replica holds its pieces only.

    memory = ReplicatedMemory(buffer, group, queue, gather=collective.gather, lazily=True)
    pieces = memory.lay_out(by_elements=True)   # the pieces of all replicas
    memory.values(piece)                        # (piece.numel,), in the parameter's own memory
    memory.start()                              # after an optimizer's step; all replicas
    module(x)                                   # each layer waits for its own parameters
    memory.finish()                             # or wait for all of them
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.queue import CommQueue, Work
from lightning_holmes.optim.arriving import Arrival
from lightning_holmes.optim.grad_buffer import Bucket, GradBuffer
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
    """Whole parameters on every replica, as views of flat buffers; the parameter objects must not be replaced.

    Args:
        buffer: the gradients, whose buckets are laid out already.
        group: the replicas, for collectives in the queue; None: there is one, and nothing is gathered.
        queue: runs the transfers; the queue of the gradients, so that all replicas run all collectives in one order.
        gather: all-gathers a flat tensor of which each rank holds its part; called in the queue.
        lazily: gather while the caller goes on.
    """

    is_whole = True

    def __init__(
        self,
        buffer: GradBuffer,
        group: dist.ProcessGroup | None,
        queue: CommQueue,
        *,
        gather: Callable[[Tensor], None],
        lazily: bool,
    ) -> None:
        self.buffers: list[Tensor] = []
        """One for each bucket of gradients: (bucket.buffer.numel(),), in the parameters' type."""
        self._buffer, self._group, self._queue = buffer, group, queue
        self._gather, self._lazily = gather, lazily
        self._extents: list[Extent] = []
        self._runs: list[list[tuple[int, int, int]]] = []
        self._views: dict[str, Tensor] = {}
        self._arrivals: list[Arrival] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._watched: nn.Module | None = None

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._buffer.parameters

    @property
    def generation(self) -> int:
        return self._buffer.generation

    def lay_out(self, *, by_elements: bool) -> list[Piece]:
        self.close()
        self._extents = [_extent(bucket) for bucket in self._buffer.buckets]
        cut = cut_by_elements if by_elements else cut_by_parameters
        pieces = cut(self._extents, 1 if self._group is None else dist.get_world_size(self._group))
        self._runs = _runs(pieces, self._extents)
        self.buffers = [self._flatten(extent) for extent in self._extents]
        if self._watched is not None:
            self.watch(self._watched)
        return pieces

    def values(self, piece: Piece) -> Tensor:
        return self.buffers[piece.bucket][piece.offset : piece.offset + piece.numel]

    def gradient(self, piece: Piece) -> Tensor:
        return self._buffer.buckets[piece.bucket].buffer[piece.offset : piece.offset + piece.numel]

    def _flatten(self, extent: Extent) -> Tensor:
        """Move the parameters of a bucket into one buffer."""
        first = dtensor.local_part(self.parameters[extent.names[0]]).detach()
        buffer = torch.zeros(extent.numel, dtype=first.dtype, device=first.device)
        start = 0
        with torch.no_grad():
            for name, size in zip(extent.names, extent.sizes, strict=True):
                local = dtensor.local_part(self.parameters[name]).detach()
                view = buffer[start : start + size].view(local.shape)
                view.copy_(local)
                self._views[name] = view
                dtensor.replace_local(self.parameters[name], view)
                start += size
        return buffer

    def adopt(self) -> None:
        """Copy parameters whose ``data`` was replaced into the buffers, and make them views of these again."""
        for name, view in self._views.items():
            local = dtensor.local_part(self.parameters[name]).detach()
            if local.data_ptr() != view.data_ptr() and local.numel():
                view.copy_(local)
                dtensor.replace_local(self.parameters[name], view)

    def watch(self, module: nn.Module) -> None:
        """Add forward pre-hooks that wait for the parameters of ``module``'s submodules from outside ``torch.nn``, which may pass their
        parameters to code that bypasses ``__torch_function__``."""
        self._watched = module
        names = {id(p): n for n, p in self.parameters.items()}
        places = {n: i for i, extent in enumerate(self._extents) for n in extent.names}
        for part in module.modules():
            own = [names[id(p)] for p in part.parameters(recurse=False) if id(p) in names]
            buckets = sorted({places[n] for n in own if n in places})
            if buckets and not type(part).__module__.startswith("torch.nn."):
                self._hooks.append(part.register_forward_pre_hook(self._waiting(buckets), prepend=True))

    def _waiting(self, buckets: Sequence[int]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._arrivals:
                for bucket in buckets:
                    self._arrivals[bucket].wait()

        return wait

    def start(self) -> None:
        """Start to gather the updated parameters, in the order in which the forward needs them; all replicas must call."""
        if self._group is None:
            return
        self.finish()
        arrivals = [
            Arrival([self.parameters[n] for n in extent.names], self._start_transfer(index))
            for index, extent in reversed(list(enumerate(self._extents)))
        ]
        self._arrivals = arrivals[::-1]
        if not self._lazily:
            self.finish()
        for arrival in arrivals:
            if not arrival.is_watched:
                arrival.wait()

    def _start_transfer(self, index: int) -> Work:
        buffer, runs, group, extent = self.buffers[index], self._runs[index], self._group, self._extents[index]
        assert group is not None
        share = buffer.numel() // dist.get_world_size(group)
        even = all(first >= rank * share and end <= (rank + 1) * share for first, end, rank in runs)

        def transfer() -> None:
            if even:
                self._gather(buffer)
                return
            for first, end, rank in runs:
                dist.broadcast(buffer[first:end], group=group, group_src=rank)

        return self._queue.start(transfer, "bucket_gather", of=f"of {extent.names[0]} to {extent.names[-1]}")

    def finish(self) -> None:
        """Wait until all parameters have arrived."""
        for arrival in reversed(self._arrivals):
            arrival.wait()
        self._arrivals = []

    def abandon(self) -> None:
        """Stop waiting for transfers that are under way."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.forget()

    def close(self) -> None:
        """Wait, and give each parameter memory of its own again."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, view in self._views.items():
            parameter = self.parameters[name]
            if dtensor.local_part(parameter).detach().data_ptr() == view.data_ptr():
                dtensor.replace_local(parameter, view.clone())
        self._views.clear()
        self.buffers.clear()


def _extent(bucket: Bucket) -> Extent:
    sizes = tuple(bucket.views[name].numel() for name in bucket.names)
    return Extent(names=bucket.names, sizes=sizes, numel=bucket.buffer.numel())


def _runs(pieces: Sequence[Piece], extents: Sequence[Extent]) -> list[list[tuple[int, int, int]]]:
    """Return, for each bucket, the contiguous runs that one rank updates: (first element, end, rank)."""
    runs: list[list[tuple[int, int, int]]] = [[] for _ in extents]
    for piece in pieces:
        if piece.numel == 0:
            continue
        found = runs[piece.bucket]
        end = piece.offset + piece.numel
        if found and found[-1][2] == piece.rank and found[-1][1] == piece.offset:
            found[-1] = (found[-1][0], end, piece.rank)
        else:
            found.append((piece.offset, end, piece.rank))
    return runs
