"""P2P: tensors and small messages between the ranks of a pipeline or a tensor group.

:class:`P2P` is the protocol that the runner uses. :class:`DistributedP2P` moves bytes by torch.distributed; within one
process ``lightning_holmes.check`` hands them over (checking/in_turns.py).

Tensors are sent in the order of the schedule, over a separate group for each ordered pair of ranks, so that a posted
NCCL receive blocks nothing else. Messages (shapes, checksums, logged values) are plain data (wire.py) and always use
gloo, on the host.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming
from lightning_holmes.comm.objects import any_of
from lightning_holmes.comm.wire import decode, encode

_INLINE_BYTES = 1016


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and ``requires_grad`` of a tensor that will arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class PendingReceive(Protocol):
    """A receive, whose memory is there: ``post`` it, once, in the order of the sends; then ``wait`` for its tensors."""

    def post(self) -> None: ...

    def wait(self) -> list[Tensor]: ...


class P2P(Protocol):
    """Point-to-point transport between the ranks of one pipeline, numbered 0 to ``size - 1``."""

    rank: int
    size: int

    @property
    def broadcasts(self) -> bool:
        """Whether :meth:`broadcast` moves tensors; if not, messages hold them."""

    def broadcast(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors of ``source`` to all ranks, into ``tensors``. All ranks must call if any does."""

    def send(self, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start to send; the tensors must not change until :meth:`finish`."""

    def prepare(self, source: int, specs: Sequence[TensorSpec]) -> PendingReceive:
        """Allocate memory for a receive of tensors from ``source``."""

    def send_message(self, destination: int, topic: int, message: Any) -> None:
        """Start to send a value that wire.py can encode."""

    def post_message(self, destination: int, topic: int, message: Any) -> Callable[[], None]:
        """Start to send a message for which :meth:`finish` does not wait, since it may be received late; return a function that waits for it."""

    def expect_message(self, source: int, topic: int) -> None:
        """Prepare for a message that is certain to come, so that receiving it later costs no time."""

    def receive_message(self, source: int, topic: int) -> Any:
        """Wait for the next value sent by ``source`` under ``topic``."""

    def finish(self) -> None:
        """Wait for this rank's sends, except those of :meth:`post_message`."""


def exchange(p2p: P2P, topic: int, mine: Any) -> list[Any]:
    """Return ``mine`` of each rank, by rank; all of them must call."""
    others = [rank for rank in range(p2p.size) if rank != p2p.rank]
    for rank in others:
        p2p.send_message(rank, topic, mine)
    found = [mine if rank == p2p.rank else p2p.receive_message(rank, topic) for rank in range(p2p.size)]
    p2p.finish()
    return found


@dataclass(slots=True)
class _Receive:
    tensors: list[Tensor]
    dtypes: list[torch.dtype]
    peer: int
    group: dist.ProcessGroup
    where: Callable[[], str]
    works: list[Any] = field(default_factory=list)

    def post(self) -> None:
        with naming(self.where):
            self.works += [dist.irecv(tensor, self.peer, group=self.group) for tensor in self.tensors]

    def wait(self) -> list[Tensor]:
        with naming(self.where):
            for work in self.works:
                wait_for(work, self.group)
        return [tensor.to(dtype) for tensor, dtype in zip(self.tensors, self.dtypes, strict=True)]


_InFlight = tuple[Any, Tensor, dist.ProcessGroup, Callable[[], str]]
"""A send under way: its work, its tensor, which must live until the work is done, its group, and a description of it."""


def _wait_for_all(sends: Sequence[_InFlight]) -> None:
    for work, _, group, where in sends:
        with naming(where):
            wait_for(work, group)


class DistributedP2P:
    """P2P over torch.distributed.

    Args:
        ranks: global ranks of the pipeline, in order.
        rank: this rank's place among them.
        outgoing: by place, a group of two for each rank that this one sends tensors to.
        incoming: by place, a group of two for each rank that this one receives tensors from.
        messages: a gloo group of all ``ranks``.
        device: where arriving tensors are put.
        narrowed: by place, the dtype in which wider floating-point tensors are sent to and received from a rank; not
            exact.
        everyone: a group of all ``ranks`` for tensors, so that messages need not hold them; None: messages hold them.
        describe: returns the description of a group for messages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        outgoing: Mapping[int, dist.ProcessGroup],
        incoming: Mapping[int, dist.ProcessGroup],
        messages: dist.ProcessGroup,
        device: torch.device,
        narrowed: Mapping[int, torch.dtype] | None = None,
        everyone: dist.ProcessGroup | None = None,
        describe: Callable[[dist.ProcessGroup], str] = lambda group: group.group_desc,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self._outgoing = outgoing
        self._incoming = incoming
        self._messages = messages
        self._device = device
        self._narrowed = dict(narrowed or {})
        self._everyone = everyone
        self._describe = describe
        self._in_flight: list[_InFlight] = []
        self._expected: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    @property
    def broadcasts(self) -> bool:
        return self._everyone is not None

    def broadcast(self, source: int, tensors: Sequence[Tensor]) -> None:
        group = self._everyone
        if group is None:
            assert not tensors
            return
        where = functools.partial(self._where, "a step's results are brought to all", group)
        with naming(where):
            for tensor in tensors:
                dist.broadcast(tensor, self.ranks[source], group=group)

    def send(self, destination: int, tensors: Sequence[Tensor]) -> None:
        self._in_flight = [entry for entry in self._in_flight if not entry[0].is_completed()]
        group = self._outgoing[destination]
        for tensor in tensors:
            data = tensor.detach().to(self._travelling(tensor.dtype, destination)).contiguous()
            self._in_flight.append(self._start_send(data, destination, group, "sending tensors"))

    def _start_send(
        self, data: Tensor, destination: int, group: dist.ProcessGroup, what: str, topic: int | None = None
    ) -> _InFlight:
        peer = self.ranks[destination]
        where = functools.partial(self._where, f"{what} to rank {peer}", group)
        with naming(where):
            tag = {} if topic is None else {"tag": topic}
            return dist.isend(data, peer, group=group, **tag), data, group, where

    def _where(self, what: str, group: dist.ProcessGroup) -> str:
        return f"on rank {self.ranks[self.rank]} while {what} in {self._describe(group)}"

    def prepare(self, source: int, specs: Sequence[TensorSpec]) -> PendingReceive:
        tensors = [
            torch.empty(spec.shape, dtype=self._travelling(spec.dtype, source), device=self._device) for spec in specs
        ]
        group, peer = self._incoming[source], self.ranks[source]
        where = functools.partial(self._where, f"receiving tensors from rank {peer}", group)
        return _Receive(tensors, [spec.dtype for spec in specs], peer, group, where)

    def _travelling(self, dtype: torch.dtype, rank: int) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is sent to or received from ``rank``."""
        narrow = self._narrowed.get(rank)
        return narrow if narrow is not None and dtype.is_floating_point and dtype.itemsize > narrow.itemsize else dtype

    def send_message(self, destination: int, topic: int, message: Any) -> None:
        self._in_flight += self._start_message(destination, topic, message)

    def post_message(self, destination: int, topic: int, message: Any) -> Callable[[], None]:
        return functools.partial(_wait_for_all, self._start_message(destination, topic, message))

    def _start_message(self, destination: int, topic: int, message: Any) -> list[_InFlight]:
        data = encode(message)
        head = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
        head[:8] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        parts = [head]
        if len(data) <= _INLINE_BYTES:
            head[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [self._start_send(part, destination, self._messages, "sending a message", topic) for part in parts]

    def expect_message(self, source: int, topic: int) -> None:
        if (source, topic) not in self._expected:
            head = torch.empty(8 + _INLINE_BYTES, dtype=torch.uint8)
            work = dist.irecv(head, self.ranks[source], group=self._messages, tag=topic)
            self._expected[source, topic] = work, head

    def receive_message(self, source: int, topic: int) -> Any:
        what = f"waiting for a message from rank {self.ranks[source]}"
        with naming(functools.partial(self._where, what, self._messages)):
            self.expect_message(source, topic)
            work, head = self._expected.pop((source, topic))
            wait_for(work, self._messages)
            length = int(head[:8].view(torch.int64).item())
            if length <= _INLINE_BYTES:
                data = head[8 : 8 + length]
            else:
                data = torch.empty(length, dtype=torch.uint8)
                rest = dist.irecv(data, self.ranks[source], group=self._messages, tag=topic)
                wait_for(rest, self._messages)
        return decode(data.numpy().data)

    def anybody(self, flag: bool, what: str) -> bool:
        """Whether ``flag`` is true on any rank; all must call. Cheaper than messages between all pairs of ranks.

        Args:
            what: what all ranks do here, for the error if one does not come.
        """
        with naming(functools.partial(self._where, what, self._messages)):
            return any_of(flag, self._messages)

    def finish(self) -> None:
        _wait_for_all(self._in_flight)
        self._in_flight.clear()
