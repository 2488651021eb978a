"""Updated parameters on their way to all replicas, bucket by bucket, while the next forward already runs.

Parameters get their values in flat buffers, laid out as their gradients are, so that a bucket is gathered in place. Until
a bucket has arrived its parameters are of the class :class:`ArrivingParameter`: torch tells it of each operation that
would read one, and the first such operation waits for that bucket. Whoever reads so waits for what it reads and no
more: the layers of the next forward, an average of weights, a checkpoint, a line of the user's. torch's own
uninitialised parameters change their class in the same way (torch/nn/parameter.py, UninitializedTensorMixin).

    gather = ParameterGather(parameters, extents, pieces, group, queue, gather=collective.gather, lazily=True)
    gather.start()              # after an optimizer's step; all replicas
    module(x)                   # each layer waits for its own
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
"""The attribute of a parameter under way that waits for its bucket."""


class ArrivingParameter(nn.Parameter):
    """A parameter whose new value is under way. Becomes an ordinary one as soon as an operation reads it."""

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


ArrivingParameter.__name__ = ArrivingParameter.__qualname__ = "Parameter"  # what people print


def _await(values: Any) -> None:
    """Wait for each parameter among the arguments of an operation."""
    if isinstance(values, ArrivingParameter):
        wait = vars(values).get(_ARRIVAL)
        if wait is None:  # a copy that somebody has made of one
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
    """The flat buffers of parameters and their gathering over replicas.

    Args:
        parameters: by name; each must stay the object that it is.
        extents: what lies in which buffer.
        pieces: of all ranks; see shards.py.
        group: the replicas; None: one, and nothing is gathered.
        queue: where transfers run, the same as that of the gradients, so that all replicas do them in one order.
        gather: brings every rank's part of a flat tensor to all.
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
        """A bucket each: (extent.numel,), in the parameters' type."""
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
        """Take over parameters whose ``data`` somebody has replaced."""
        for name, view in self._views.items():
            local = dtensor.local_part(self._parameters[name]).detach()
            if local.data_ptr() != view.data_ptr() and local.numel():
                view.copy_(local)
                dtensor.replace_local(self._parameters[name], view)

    def watch(self, module: nn.Module) -> None:
        """Wait before ``module``'s parts run that may hand their parameters to code which torch does not see."""
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
        """Send what this rank has updated; all replicas must call. In the order in which the forward needs it."""
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
        buffer, runs, group = self.buffers[index], self._runs[index], self._group
        assert group is not None
        share = buffer.numel() // dist.get_world_size(group)
        even = all(first >= rank * share and end <= (rank + 1) * share for first, end, rank in runs)

        def transfer() -> None:
            if even:
                self._gather(buffer)
                return
            for first, end, rank in runs:
                dist.broadcast(buffer[first:end], group=group, group_src=rank)

        return self._queue.start(transfer, "bucket_gather")

    def finish(self) -> None:
        """Wait until all parameters have arrived."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in reversed(arrivals):
            arrival.wait()

    def abandon(self) -> None:
        """Do not wait any more for what is under way."""
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
    """A bucket under way."""

    def __init__(self, parameters: Sequence[nn.Parameter], work: Work) -> None:
        self._work: Work | None = work
        self._marked: list[nn.Parameter] = []
        for parameter in parameters:
            if type(parameter) is not nn.Parameter:  # a class of the user's, a DTensor: torch would not tell us
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
        """Make the parameters ordinary ones."""
        self._work = None
        marked, self._marked = self._marked, []
        for parameter in marked:
            parameter.__class__ = nn.Parameter
            vars(parameter).pop(_ARRIVAL, None)


def can_gather_lazily(module: nn.Module) -> bool:
    """Whether every reader of ``module``'s parameters is seen: compiled code reads them past Python."""
    return not any(isinstance(part, torch.jit.ScriptModule) or is_compiled(part) for part in module.modules())


def _runs(pieces: Sequence[Piece], extents: Sequence[Extent]) -> list[list[tuple[int, int, int]]]:
    """For each bucket, what lies side by side on one rank: first element, after the last one, rank."""
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
