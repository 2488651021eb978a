"""Arrival: parameters whose updated values are still on their way; the first read of one waits for them.

Until its bucket has arrived a parameter has the class :class:`ArrivingParameter`: torch calls its ``__torch_function__`` for each
operation that would read it, and the first such operation waits for that bucket. So every reader waits only for the buckets
that it reads: the layers of the next forward, an average of weights, a checkpoint, the user's own code. torch's
uninitialised parameters change their class in the same way (torch/nn/parameter.py, UninitializedTensorMixin).

    arrival = Arrival([layer.weight, layer.bias], queue.start(gather))
    layer(x)                    # waits
    arrival.wait()              # does nothing any more
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_holmes.comm.absent import READS_NO_VALUE
from lightning_holmes.comm.queue import Work
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


class Arrival:
    """Parameters that are gathered together by ``work``.

    Attributes:
        is_watched: whether all their reads wait; if not, the caller must.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], work: Work) -> None:
        self._work: Work | None = work
        self._waiting = threading.Lock()
        self._marked: list[nn.Parameter] = []
        for parameter in parameters:
            if type(parameter) is not nn.Parameter:  # a user's subclass or a DTensor: its reads cannot be intercepted
                continue
            parameter.__class__ = ArrivingParameter
            vars(parameter)[_ARRIVAL] = self.wait
            self._marked.append(parameter)
        self.is_watched = len(self._marked) == len(parameters)

    def wait(self) -> None:
        """Wait; threads that read at the same time all wait. What the transfer raised is raised to each reader."""
        with self._waiting:
            if self._work is not None:
                self._work.wait()
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
