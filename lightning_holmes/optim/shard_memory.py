"""ShardMemory: holds the values and gradients of a sharded optimizer's pieces.

There are two kinds: with :class:`ReplicatedMemory` every replica holds whole parameters in flat buffers with the layout of their
gradients, and updated pieces are gathered in place, bucket by bucket, while the next forward already runs (ZeRO stage 1); a read of a
parameter waits for its bucket (arriving.py). With StageShards (stage_shards.py) a replica holds its pieces only.

    memory = ReplicatedMemory(reducer, group, lazily=True)
    pieces = memory.lay_out(by_elements=True)   # the pieces of all replicas
    memory.values(piece)                        # (piece.numel,), in the parameter's own memory
    memory.start()                              # after an optimizer's step; all replicas
    module(x)                                   # each layer waits for its own parameters
    memory.finish()                             # or wait for all of them
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.queue import Work, use_here
from lightning_holmes.optim.arriving import Arrival
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.unit import Piece, Unit, cut_by_elements, cut_by_parameters


class ShardMemory:
    """The memory of one sharded optimizer; all replicas must create one, with equal arguments, and call its methods together.

    Args:
        parameters: this rank's, by name; their values may be elsewhere.
        size, rank: the number of replicas, and the index of this one.

    Attributes:
        is_whole: whether every replica holds whole parameters, of which pieces are views.
        units: as they are laid out.
    """

    is_whole: bool

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, size: int, rank: int) -> None:
        self.parameters = parameters
        self.size, self.rank = size, rank
        self.units: list[Unit] = []

    @property
    def generation(self) -> int:
        """A counter that changes when pieces have to be laid out anew."""
        return 0

    def lay_out(self, *, by_elements: bool) -> list[Piece]:
        """Cut the parameters by elements, or assign whole ones; returns the pieces of all replicas, in the same order on all."""
        raise NotImplementedError

    def values(self, piece: Piece) -> Tensor:
        """Return the values of one of this rank's pieces, (piece.numel,), in memory that the optimizer may write to."""
        unit = self.units[piece.unit]
        return self._own(unit, unit.values, piece)

    def gradient(self, piece: Piece) -> Tensor:
        """Return the reduced gradient of one of this rank's pieces, (piece.numel,)."""
        unit = self.units[piece.unit]
        assert unit.gradient is not None
        return self._own(unit, unit.gradient, piece)

    def _own(self, unit: Unit, flat: Tensor, piece: Piece) -> Tensor:
        start = piece.offset - (0 if self.is_whole else self.rank * (unit.numel // self.size))
        return flat[start : start + piece.numel]

    def adopt(self) -> None:
        """Take over parameters whose ``data`` was replaced since the last step."""

    def start(self) -> None:
        """Start to distribute this rank's updated pieces, after an optimizer step."""

    def finish(self) -> None:
        """Wait until all parameters have arrived."""

    def abandon(self) -> None:
        """Stop waiting for transfers that are under way."""

    def close(self) -> None:
        """Give each parameter memory of its own again."""


class ReplicatedMemory(ShardMemory):
    """Whole parameters on every replica, as views of flat tensors; the parameter objects must not be replaced.

    Args:
        reducer: has the units, which are laid out already, and their gradients. Transfers run in its queue, so that all replicas run all
            collectives in one order.
        group: the replicas; None: there is one, and nothing is gathered.
        lazily: gather while the caller goes on.
    """

    is_whole = True

    def __init__(self, reducer: BucketReducer, group: dist.ProcessGroup | None, *, lazily: bool) -> None:
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        super().__init__(reducer.parameters, size=size, rank=rank)
        self._reducer, self._group, self._lazily = reducer, group, lazily
        self._runs: list[list[tuple[int, int, int]]] = []
        self._views: dict[str, Tensor] = {}
        self._arrivals: list[Arrival] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._watched: nn.Module | None = None

    @property
    def generation(self) -> int:
        return self._reducer.generation

    @torch.no_grad()
    def lay_out(self, *, by_elements: bool) -> list[Piece]:
        self.close()
        self.units = list(self._reducer.units)
        pieces = (cut_by_elements if by_elements else cut_by_parameters)(self.units, self.size)
        self._runs = _runs(pieces, self.units)
        for unit in self.units:
            unit.values = torch.zeros(unit.numel, dtype=unit.dtype, device=unit.device)
            for name, view in unit.views(unit.values).items():
                view.copy_(dtensor.local_part(self.parameters[name]).detach())
                self._views[name] = view
                dtensor.replace_local(self.parameters[name], view)
        if self._watched is not None:
            self.watch(self._watched)
        return pieces

    def adopt(self) -> None:
        """Copy parameters whose ``data`` was replaced into the units, and make them views of these again."""
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
        places = {n: i for i, unit in enumerate(self.units) for n in unit.names}
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
            Arrival([self.parameters[n] for n in unit.names], self._start_transfer(unit, runs))
            for unit, runs in reversed(list(zip(self.units, self._runs, strict=True)))
        ]
        self._arrivals = arrivals[::-1]
        if not self._lazily:
            self.finish()
        for arrival in arrivals:
            if not arrival.is_watched:
                arrival.wait()

    def _start_transfer(self, unit: Unit, runs: Sequence[tuple[int, int, int]]) -> Work:
        group, collective, values = self._group, self._reducer.collective, unit.values
        assert group is not None and collective is not None
        share = unit.numel // self.size
        even = all(first >= rank * share and end <= (rank + 1) * share for first, end, rank in runs)

        def transfer() -> None:
            if even:
                collective.gather(values)
                return
            use_here(values)
            for first, end, rank in runs:
                dist.broadcast(values[first:end], group=group, group_src=rank)

        return self._reducer.queue.start(transfer, "bucket_gather", of=f"of {unit}")

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
        for unit in self.units:
            unit.values = torch.zeros(0)


def _runs(pieces: Sequence[Piece], units: Sequence[Unit]) -> list[list[tuple[int, int, int]]]:
    """Return, for each unit, the contiguous runs that one rank updates: (first element, end, rank)."""
    runs: list[list[tuple[int, int, int]]] = [[] for _ in units]
    for piece in pieces:
        if piece.numel == 0:
            continue
        found = runs[piece.unit]
        end = piece.offset + piece.numel
        if found and found[-1][2] == piece.rank and found[-1][1] == piece.offset:
            found[-1] = (found[-1][0], end, piece.rank)
        else:
            found.append((piece.offset, end, piece.rank))
    return runs
