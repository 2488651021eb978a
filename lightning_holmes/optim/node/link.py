"""Link: one end of the gloo group of a worker and an optimizer node, and the actions that both perform in it.

Replica 0 of the workers that hold the same stages names each action as its schedule comes to it, in one small frame; then the node
and all these workers perform it. FETCH has a stream of its own, so that parameters come while gradients go.

    link.order(Action.GRADIENT, unit=3, number=window)         # on the worker; link.hear(Stream.PUSH) on the node
    link.send(gradient, Stream.PUSH).wait()                    # on the worker; link.receive(sum, Stream.PUSH).wait() on the node
"""

import contextlib
import enum
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.errors import ConfigurationError, HolmesError, UnreachableError
from lightning_holmes.torch_private import gloo_device, gloo_group

_ALWAYS = timedelta(days=300)
_CONNECT = timedelta(seconds=60)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Stream(enum.IntEnum):
    """Actions of a stream are performed in the order in which they are named; the values are gloo's tags."""

    PULL = 2
    PUSH = 4


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
    GROUPS = 4
    """Add parameter groups; every worker sends them."""
    NORM = 5
    """Answer the squared norm of gradients."""
    FINITE = 6
    """Answer whether all gradients are finite."""
    KEEP = 7
    """Receive the unit's parameters, version ``number``, from the first worker."""
    VALUES = 8
    """Send the unit's parameters of version ``number`` to the workers that the message names."""
    STATES = 9
    """Send each worker the states of the parameters that the message names for it, all of the unit, each a message."""
    LOAD = 10
    """Load states, which are the message."""
    SETTLE = 11
    """Answer when all steps that were committed are complete; ``flag``: the run has ended well, and workers may leave."""

    @property
    def stream(self) -> Stream:
        """The stream to which the action belongs."""
        return Stream.PULL if self is Action.FETCH else Stream.PUSH


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
        explain: Callable[[str], Exception],
    ) -> None:
        self.peer, self._explain = peer, explain
        self._other, self._limit = int(not is_node), timeout or _ALWAYS
        try:
            device = gloo_device(None, address=address)
            self._group = gloo_group(store, int(is_node), 2, [device], self._limit, connect=_CONNECT)
        except RuntimeError as error:
            raise UnreachableError(f"{peer} cannot be reached from {address}. gloo says: {error}") from error

    def send(self, tensor: Tensor, stream: Stream) -> "Transfer":
        """Start to send a contiguous tensor on the host, which must not change before ``wait`` of the transfer."""
        return self._start(self._group.send, tensor, stream + 1)

    def receive(self, tensor: Tensor, stream: Stream) -> "Transfer":
        """Start to receive into a contiguous tensor on the host."""
        return self._start(self._group.recv, tensor, stream + 1)

    def order(
        self, action: Action, *, unit: int = 0, number: int = 0, flag: bool = False, message: Any = None
    ) -> "Transfer":
        """Start to send the name of the next action, with its arguments."""
        data = None if message is None else pack(message)
        frame = torch.tensor([action, unit, number, flag, 0 if data is None else data.numel()])
        last = self._start(self._group.send, frame, action.stream)
        return last if data is None else last.also(self._start(self._group.send, data, action.stream))

    def hear(self, stream: Stream) -> Order:
        """Wait for the next order of a stream."""
        frame = torch.empty(5, dtype=torch.int64)
        self._start(self._group.recv, frame, stream).wait()
        action, unit, number, flag, size = frame.tolist()
        message = None
        if size:
            data = torch.empty(size, dtype=torch.uint8)
            self._start(self._group.recv, data, stream).wait()
            message = unpack(data)
        return Order(action=Action(action), unit=unit, number=number, flag=bool(flag), message=message)

    def tell(self, message: Any) -> None:
        """Send a message in the stream of answers."""
        data = pack(message)
        self.send(torch.tensor([data.numel()]), Stream.PUSH).wait()
        self.send(data, Stream.PUSH).wait()

    def told(self) -> Any:
        """Wait for the other end's :meth:`tell`."""
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size, Stream.PUSH).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data, Stream.PUSH).wait()
        return unpack(data)

    def _start(self, act: Callable[..., Any], tensor: Tensor, tag: int) -> "Transfer":
        if not tensor.numel():
            return Transfer(self, [])
        with self._explaining():
            return Transfer(self, [(act([tensor.detach()], self._other, tag), tensor)])

    def wait_for(self, work: Any) -> None:
        """Wait for one of gloo's works; raises the error that explains a lost connection."""
        with self._explaining():
            work.wait(self._limit)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, HolmesError):
                raise
            raise self._explain(str(error).splitlines()[0]) from error


class Transfer:
    """Sends or receives that are under way."""

    def __init__(self, link: Link, works: list[tuple[Any, Tensor]]) -> None:
        self._link, self._works = link, works  # with the tensors, whose memory gloo uses

    def also(self, other: "Transfer") -> "Transfer":
        """Return both."""
        return Transfer(self._link, self._works + other._works)

    def wait(self) -> None:
        """Wait until all are done."""
        for work, _ in self._works:
            self._link.wait_for(work)


def pack(message: Any) -> Tensor:
    """Return a message of plain values and tensors as bytes, (size,) uint8."""
    file = io.BytesIO()
    torch.save(message, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Return the message of :func:`pack`, its tensors on the host. Nothing but plain values and tensors is unpickled."""
    return torch.load(io.BytesIO(memoryview(data.numpy())), map_location="cpu", weights_only=True)  # type: ignore[arg-type]


def check_plain(value: Any, what: str) -> None:
    """Refuse a value that cannot be sent as plain data, or contains a tensor.

    Raises:
        ConfigurationError: names the value by ``what``.
    """
    if isinstance(value, Tensor):
        raise ConfigurationError(f"{what} is a tensor, and only plain numbers are sent to optimizer nodes; use a float")
    if type(value) in (list, tuple, set, dict):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            check_plain(each, what)
    elif type(value) not in _PLAIN:
        raise ConfigurationError(
            f"{what} = {value!r} is a {type(value).__name__}, and only plain values are sent to optimizer nodes"
        )
