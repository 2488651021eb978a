"""Gathers updated parameters on all replicas, bucket by bucket, while the next forward already runs.

Parameters are views of flat buffers with the layout of their gradients, so that a bucket is gathered in place. Until
a bucket has arrived its parameters have the class :class:`ArrivingParameter`: torch calls its ``__torch_function__`` for each
operation that would read one, and the first such operation waits for that bucket. So every reader waits only for the buckets
that it reads: the layers of the next forward, an average of weights, a checkpoint, the user's own code. torch's
uninitialised parameters change their class in the same way (torch/nn/parameter.py, UninitializedTensorMixin).

    gather = ParameterGather(parameters, extents, pieces, group, queue, gather=collective.gather, lazily=True)
    gather.start()              # after an optimizer's step; all replicas
    module(x)                   # each layer waits for its own parameters
    gather.finish()             # or wait for all of them
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import READS_NO_VALUE
from lightning_holmes.comm.queue import CommQueue, Work
from lightning_holmes.optim.shards import Extent, Piece
from lightning_holmes.torch_private import is_compiled, without_torch_functions

_ARRIVAL = "_holmes_arrival"
"""The attribute of an arriving parameter that holds the function which waits for its bucket."""


class ArrivingParameter(nn.Parameter):
    """A parameter whose new value has not arrived yet. Becomes an ordinary parameter as soon as an operation reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_NO_VALUE:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        _await(args)
        _await(kwargs)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        _await((self,))
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _await((self,))
        return self.__reduce_ex__(protocol)


ArrivingParameter.__name__ = ArrivingParameter.__qualname__ = "Parameter"  # for repr and error messages


def _await(values: Any) -> None:
    """Wait for each arriving parameter among the arguments of an operation."""
    if isinstance(values, ArrivingParameter):
        wait = vars(values).get(_ARRIVAL)
        if wait is None:  # a copy of an arriving parameter
            values.__class__ = nn.Parameter  # type: ignore[assignment]
        else:
            wait()
    elif isinstance(values, Mapping):
        for value in values.values():
            _await(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _await(value)


class ParameterGather:
    """Holds parameters in flat buffers and gathers them over replicas.

    Args:
        parameters: by name; the parameter objects must not be replaced.
        extents: the layout of each buffer.
        pieces: the pieces of all ranks; see shards.py.
        group: the replicas; None: there is one, and nothing is gathered.
        queue: runs the transfers; the queue of the gradients, so that all replicas run all collectives in one order.
        gather: all-gathers a flat tensor of which each rank holds its part.
        lazily: gather while the caller goes on.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        extents: Sequence[Extent],
        pieces: Sequence[Piece],
        group: dist.ProcessGroup | None,
        queue: CommQueue,
        *,
        gather: Callable[[Tensor], None],
        lazily: bool,
    ) -> None:
        self._parameters = parameters
        self._extents = extents
        self._group = group
        self._queue = queue
        self._gather = gather
        self._lazily = lazily
        self._views: dict[str, Tensor] = {}
        self._arrivals: list[_Arrival] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.buffers = [self._flatten(extent) for extent in extents]
        """One buffer for each extent: (extent.numel,), in the parameters' type."""
        self._runs = _runs(pieces, extents)

    def _flatten(self, extent: Extent) -> Tensor:
        """Move the parameters of a bucket into one buffer."""
        first = dtensor.local_part(self._parameters[extent.names[0]]).detach()
        buffer = torch.zeros(extent.numel, dtype=first.dtype, device=first.device)
        start = 0
        with torch.no_grad():
            for name, size in zip(extent.names, extent.sizes, strict=True):
                local = dtensor.local_part(self._parameters[name]).detach()
                view = buffer[start : start + size].view(local.shape)
                view.copy_(local)
                self._views[name] = view
                dtensor.replace_local(self._parameters[name], view)
                start += size
        return buffer

    def adopt(self) -> None:
        """Copy parameters whose ``data`` was replaced into the buffers, and make them views of these again."""
        for name, view in self._views.items():
            local = dtensor.local_part(self._parameters[name]).detach()
            if local.data_ptr() != view.data_ptr() and local.numel():
                view.copy_(local)
                dtensor.replace_local(self._parameters[name], view)

    def watch(self, module: nn.Module) -> None:
        """Add forward pre-hooks that wait for the parameters of ``module``'s submodules from outside ``torch.nn``, which may pass their
        parameters to code that bypasses ``__torch_function__``."""
        names = {id(p): n for n, p in self._parameters.items()}
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
            _Arrival([self._parameters[n] for n in extent.names], self._start_transfer(index))
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
        arrivals, self._arrivals = self._arrivals, []
        for arrival in reversed(arrivals):
            arrival.wait()

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
            parameter = self._parameters[name]
            if dtensor.local_part(parameter).detach().data_ptr() == view.data_ptr():
                dtensor.replace_local(parameter, view.clone())
        self._views.clear()
        self.buffers.clear()


class _Arrival:
    """A bucket that is being gathered."""

    def __init__(self, parameters: Sequence[nn.Parameter], work: Work) -> None:
        self._work: Work | None = work
        self._marked: list[nn.Parameter] = []
        for parameter in parameters:
            if type(parameter) is not nn.Parameter:  # a user's subclass or a DTensor: its reads cannot be intercepted
                continue
            parameter.__class__ = ArrivingParameter
            vars(parameter)[_ARRIVAL] = self.wait
            self._marked.append(parameter)
        self.is_watched = len(self._marked) == len(parameters)

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self.forget()

    def forget(self) -> None:
        """Make the parameters ordinary ones again."""
        self._work = None
        marked, self._marked = self._marked, []
        for parameter in marked:
            parameter.__class__ = nn.Parameter
            vars(parameter).pop(_ARRIVAL, None)


def can_gather_lazily(module: nn.Module) -> bool:
    """Whether every read of ``module``'s parameters can be intercepted: compiled code reads them without calling Python."""
    return not any(isinstance(part, torch.jit.ScriptModule) or is_compiled(part) for part in module.modules())


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
