"""Link: one end of the gloo group of a worker and an optimizer node, and the actions that both perform in it.

Replica 0 of the workers that hold the same stages names each action as its schedule comes to it, in one small frame; then the node
and all these workers perform it. FETCH has a stream of its own, so that parameters come while gradients go.

    link.order(Action.GRADIENT, unit=3, number=window)         # on the worker; link.hear() on the node
    link.send(gradient).wait()                                 # on the worker; link.receive(sum).wait() on the node
"""

import contextlib
import enum
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.errors import HolmesError, UnreachableError
from lightning_holmes.torch_private import gloo_device, gloo_group

_ALWAYS = timedelta(days=300)
_CONNECT = timedelta(seconds=60)

# gloo's tags: orders of either stream, gradients and values, and from FETCHED on the parameters of each unit
FETCHES, OTHERS, DATA, FETCHED = range(4)


class Action(enum.IntEnum):
    """What an optimizer node does next; ``unit``, ``number``, ``flag`` and ``message`` belong to the order."""

    FETCH = 0
    """Send the unit's parameters of version ``number`` to all workers."""
    GRADIENT = 1
    """Receive and sum the unit's gradients of window ``number``; ``flag``: the last ones, and the update need not wait for the step."""
    BEGIN = 2
    """The last batch of window ``number`` begins; every worker sends the options of the optimizer's groups."""
    COMMIT = 3
    """Step with the gradients of window ``number``; every worker sends the options, and what clipping does to the gradients."""
    NORM = 4
    """Answer the squared norm of gradients."""
    FINITE = 5
    """Answer whether all gradients are finite."""
    KEEP = 6
    """Receive the unit's parameters, version ``number``, from the first worker."""
    VALUES = 7
    """Send the unit's parameters of version ``number`` to the workers that the message names."""
    STATES = 8
    """Answer each worker with the states of the parameters that the message names for it, all of the unit."""
    LOAD = 9
    """Load states, which are the message."""
    SETTLE = 10
    """Answer when all steps that were committed are complete; ``flag``: every worker says that the run has ended well, and may then leave."""
    ANSWER = 11
    """The other end's answer is the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An action that was named, with its arguments."""

    action: Action
    unit: int
    number: int
    flag: bool
    message: Any


class Link:
    """One end of the group of a worker and a node. Threads may share it, one for each stream.

    Args:
        store: both ends meet in it.
        address: this end's address, on the card that reaches the other end.
        peer: the other end in words.
        timeout: how long a transfer may take; None: without limit.
        explain: returns the error to raise when the connection is lost.
    """

    def __init__(
        self,
        store: Any,
        address: str,
        *,
        is_node: bool,
        peer: str,
        timeout: timedelta | None,
        explain: Callable[[str], BaseException],
    ) -> None:
        self.peer, self._explain = peer, explain
        self._other, self.limit = int(not is_node), timeout or _ALWAYS
        try:
            device = gloo_device(None, address=address)
            self._group = gloo_group(store, int(is_node), 2, [device], self.limit, connect=_CONNECT)
        except RuntimeError as error:
            raise UnreachableError(f"{peer} cannot be reached from {address}. gloo says: {error}") from error

    def send(self, tensor: Tensor, tag: int = DATA) -> "Transfer":
        """Start to send a contiguous tensor on the host, which must not change before ``wait`` of the transfer."""
        return self._start(self._group.send, tag, tensor)

    def receive(self, tensor: Tensor, tag: int = DATA) -> "Transfer":
        """Start to receive into a contiguous tensor on the host."""
        return self._start(self._group.recv, tag, tensor)

    def order(
        self, action: Action, *, unit: int = 0, number: int = 0, flag: bool = False, message: Any = None
    ) -> "Transfer":
        """Start to send the name of the next action, with its arguments."""
        data = [] if message is None else [pack(message)]
        frame = torch.tensor([action, unit, number, flag, sum(map(len, data))])
        return self._start(self._group.send, FETCHES if action is Action.FETCH else OTHERS, frame, *data)

    def hear(self, stream: int = OTHERS) -> Order:
        """Wait for the next order of a stream."""
        frame = torch.empty(5, dtype=torch.int64)
        self.receive(frame, stream).wait()
        action, unit, number, flag, size = frame.tolist()
        data = torch.empty(size, dtype=torch.uint8)
        self.receive(data, stream).wait()
        message = unpack(data) if size else None
        return Order(action=Action(action), unit=unit, number=number, flag=bool(flag), message=message)

    def answer(self, message: Any) -> None:
        """Send a message for which the other end waits by ``hear().message``."""
        self.order(Action.ANSWER, message=message).wait()

    def _start(self, act: Callable[..., Any], tag: int, *tensors: Tensor) -> "Transfer":
        with self.explaining():
            return Transfer(self, [(act([t.detach()], self._other, tag), t) for t in tensors if t.numel()])

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Inside, replace gloo's error by the one that explains the lost connection."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, HolmesError):
                raise
            raise self._explain(str(error).splitlines()[0]) from error


class Transfer:
    """Sends or receives that are under way, with their tensors, whose memory gloo uses."""

    def __init__(self, link: Link, works: list[tuple[Any, Tensor]]) -> None:
        self._link, self._works = link, works

    def wait(self) -> None:
        """Wait until all are done."""
        with self._link.explaining():
            for work, _ in self._works:
                work.wait(self._link.limit)


def pack(message: Any) -> Tensor:
    """Return a message of plain values and tensors as bytes, (size,) uint8."""
    file = io.BytesIO()
    torch.save(message, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Return the message of :func:`pack`, its tensors on the host. Nothing but plain values and tensors is unpickled."""
    return torch.load(io.BytesIO(memoryview(data.numpy())), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
