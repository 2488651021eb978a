"""MovableGroup: a gloo or NCCL group that can be reconnected over other cards while it is in use; transfers that were under way are repeated.

Callers that wait in the group only see an operation that takes longer. gloo works on copies of the tensors: an in-place
reduction that breaks has overwritten its input, and gloo's threads may hang in a transfer that is half done; they are
left behind with their copies. When a group is moved (moves.py), its members compare how far each has come:

- a collective that some member has not completed is run again by all; a member that had completed it gives its input
  again and discards the result, which it already has: the same inputs in the same order give the same bits;
- a tensor that was sent and has not arrived is sent again. The kernel takes the data of a send and does not report its
  arrival; but it takes no more than its buffers hold, so only the last bytes are kept.

    group = MovableGroup(connect, rank, size, timeout, junction)      # torch's new_group returns it
    dist.all_reduce(tensor, group=group)                  # as with any group
"""

import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.on_host import OnHost
from lightning_holmes.errors import ConnectionLostError, UnsupportedModuleError
from lightning_holmes.torch_private import ForwardingGroup, leave_for_good

KEPT_BYTES = 64 * 2**20
"""Bytes of completed operations that are kept, of collectives and of sends to each peer: more than the kernel's buffers
on the way hold, by their usual limits."""
_ABOUT_BYTES = 64 * 2**10  # added to the tensors' bytes of each operation, so that small ones do not become too many
_DECLARED_S = 6.0  # a rank announces a move in the store before it ends connections; busy machines look there seldom
_ENDED_S = 2.0  # operations end as soon as their sockets have, except those that are left behind
_EVERYONE = ("allreduce", "allgather", "reduce_scatter", "barrier", "all_gather", "_allgather", "_reduce_scatter")
"""Prefixes of the names of collectives that no member completes before all members have begun them."""
_GIVES_FIRST = ("allgather", "reduce_scatter", "_allgather", "_reduce_scatter", "all_gather")
"""Prefixes of the names of collectives whose first argument is the output: it is filled, and not read."""


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation of a group. ``issue(group)`` starts it, or repeats it; the result of a repetition is discarded if it was completed before.

    ``arrive()`` copies the result into the caller's tensors, which gloo itself never sees: one of its threads may be
    left behind.
    ``number``: its place in its ``stream`` (kind, peer, tag), beginning with 1. ``before``: collectives that were done
    when it began.
    ``mark``: the work that the device had been given until then.
    """

    stream: tuple[str, int, int]
    number: int
    issue: Callable[[Any], Any]
    num_bytes: int = 0
    proves: bool = False
    before: list["_Operation"] = field(default_factory=list)
    mark: Any = None
    work: Any = None
    arrive: Callable[[], None] = lambda: None
    waiting: "_Waiting | None" = None
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    work: Any
    timeout: timedelta | None
    is_over: bool = False
    error: Exception | None = None


_COLLECTIVE = ("collective", 0, 0)


class Junction:
    """State that the movable groups of a rank share.

    Attributes:
        changed: the condition that guards all groups; notified whenever one is moved or an operation has ended.
        groups: in the order in which they were made, which is the same on all ranks that share some.
        devices: the gloo devices that connect the groups.
        expects: returns whether a move may be announced; a broken connection then waits for it.
    """

    def __init__(self, devices: Any) -> None:
        self.changed = threading.Condition()
        self.devices = devices
        self.groups: list[MovableGroup] = []
        self.expects: Callable[[], bool] = lambda: False
        self._idle: list[queue.SimpleQueue[_Waiting]] = []

    def wait_apart(self, work: Any, timeout: timedelta | None) -> "_Waiting":
        """Wait for a work of gloo in another thread, which can be left behind: for a tensor that is half transferred
        gloo (torch 2.13) reports the end of its connection neither to the sender nor to the receiver."""
        waiting = _Waiting(work, timeout)
        if self._idle:
            given = self._idle.pop()
        else:
            given = queue.SimpleQueue()
            threading.Thread(target=self._wait, args=(given,), name="holmes-wait", daemon=True).start()
        given.put(waiting)
        return waiting

    def _wait(self, given: "queue.SimpleQueue[_Waiting]") -> None:
        while True:
            waiting = given.get()
            error = _wait(waiting.work, waiting.timeout)
            with self.changed:
                waiting.work, waiting.error, waiting.is_over = None, error, True
                self._idle.append(given)
                self.changed.notify_all()
            del waiting, error


class MovableGroup(ForwardingGroup):
    """A group that forwards to another one, which can be exchanged.

    Args:
        connect: connects the members over the cards that are chosen now, given the store in which they meet (None: the
            first time), and returns the group to forward to.
        rank, size: this member's rank in the group, and the number of members.
        timeout: the timeout of operations.
        junction: the junction of this rank.
        side: handles what depends on where the tensors are; None: they are on the host.
    """

    def __init__(
        self,
        connect: Callable[[Any], Any],
        rank: int,
        size: int,
        timeout: timedelta,
        junction: Junction,
        side: OnHost | None = None,
    ) -> None:
        self._side = side or OnHost()
        super().__init__(rank, size, timeout, self._side.backend_name)
        self.is_moving = False
        self.connect = connect
        self._junction = junction
        self._log: list[_Operation] = []
        self._issued: dict[tuple[str, int, int], int] = {}
        self._received: dict[tuple[str, int, int], int] = {}
        self._sent: dict[int, collections.deque[_Operation]] = collections.defaultdict(collections.deque)
        self._sent_bytes: dict[int, int] = collections.defaultdict(int)
        self._moves = 0
        self._lost: Exception | None = None
        self.reconnect(None)
        junction.groups.append(self)

    # operations that torch.distributed calls

    def collective(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert not any(True for _ in _tensors(list(kwargs.values()))), "torch gives a group its tensors by their places"
        first = 1 if name.startswith(_GIVES_FIRST) else 0
        kept = tuple(_copied(arg) for arg in args[first:])
        given: list[tuple[Any, ...]] = [()]

        def issue(group: Any) -> Any:
            given[0] = (*(_blank(arg) for arg in args[:first]), *(kept if first else map(_copied, kept)))
            return getattr(group, name)(*given[0], **kwargs)

        def arrive() -> None:
            for tensor, came in zip(_tensors(args), _tensors(given[0]), strict=True):
                if not first or any(tensor is t for t in _tensors(args[0])):
                    _take(tensor, came)
            given[0] = ()

        proves = name.startswith(_EVERYONE)
        return self._start(_COLLECTIVE, issue, arrive, num_bytes=_size(kept), proves=proves)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        kept = [tensor.detach().clone() for tensor in tensors]
        return self._start(("send", peer, tag), lambda group: group.send(kept, peer, tag), num_bytes=_size(kept))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        came: list[Tensor] = []

        def issue(group: Any) -> Any:
            came[:] = _blank(tensors)
            return group.recv(came, peer, tag)

        def arrive() -> None:
            for tensor, new in zip(tensors, came, strict=True):
                _take(tensor, new)
            came.clear()

        return self._start(("receive", peer, tag), issue, arrive)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise UnsupportedModuleError(
            f"a receive from any rank in the group {self.group_desc}: with repeat_transfers=True torch.distributed.recv must name the rank, src"
        )

    def shutdown(self) -> None:
        """Close the group when it is destroyed."""
        with self._junction.changed:
            if self in self._junction.groups:
                self._junction.groups.remove(self)
            self._log.clear()
            self._sent.clear()
        if self.forwarded is not None and self._lost is None:
            self._side.close(self.forwarded)
        self.forward_to(None)  # destroying a gloo group waits for the operations under way in it

    def _start(
        self,
        stream: tuple[str, int, int],
        issue: Callable[[Any], Any],
        arrive: Callable[[], None] = lambda: None,
        **about: Any,
    ) -> "MovableWork":
        changed = self._junction.changed
        with changed:
            changed.wait_for(lambda: not self.is_moving)
            number = self._issued[stream] = self._issued.get(stream, 0) + 1
            operation = _Operation(stream, number, issue, arrive=arrive, **about)
            if operation.proves:
                operation.before = [o for o in self._log if o.is_done and o.stream == _COLLECTIVE]
            self._log.append(operation)
            operation.mark = self._side.mark()
            self._issue(operation)
        return MovableWork(self, operation)

    def _issue(self, operation: _Operation) -> None:
        operation.waiting = None
        try:
            if self._lost is not None:
                raise self._lost
            operation.work = operation.issue(self.forwarded)
        except Exception as error:
            operation.work = _Failed(error)

    def finish(self, operation: _Operation, timeout: timedelta | None) -> bool:
        """Wait until an operation is done, including any repetition."""
        changed = self._junction.changed
        while True:
            with changed:
                changed.wait_for(lambda: not self.is_moving)
                if operation.is_done:
                    return True
                moves = self._moves
                waiting = operation.waiting = operation.waiting or self._junction.wait_apart(operation.work, timeout)
                # a whole move may pass before this thread runs again
                changed.wait_for(lambda: waiting.is_over or self.is_moving or operation.waiting is not waiting)  # noqa: B023
                if operation.is_done or not waiting.is_over or operation.waiting is not waiting:
                    continue  # a move has meanwhile reported the operation to the others as not done
                if waiting.error is None:
                    self._complete(operation)
                    return True
            if not self._is_moved_after(moves):
                raise waiting.error

    def has_ended(self, operation: _Operation) -> bool:
        """Whether an operation is done; does not wait."""
        work = operation.work
        if self._side.has_ended(work):
            with self._junction.changed:
                if operation.work is work and not operation.is_done and not self.is_moving:
                    self._complete(operation)
        return operation.is_done

    def _is_moved_after(self, moves: int) -> bool:
        """Wait for the move that a broken connection belongs to; return whether one has begun."""
        end, changed = time.monotonic() + _DECLARED_S, self._junction.changed
        with changed:
            while not (self.is_moving or self._moves > moves):
                if self._lost is not None or time.monotonic() > end or not self._junction.expects():
                    return False
                changed.wait(0.05)
        return True

    def _complete(self, operation: _Operation) -> None:
        """Mark an operation as done, and drop kept operations that all members have completed or that exceed
        KEPT_BYTES. The caller holds the lock."""
        operation.is_done = True
        operation.work = operation.waiting = None
        with torch.inference_mode():  # may write to inference tensors, and records no graph
            operation.arrive()
        stream = operation.stream
        if stream == _COLLECTIVE:
            for earlier in operation.before:
                if earlier in self._log:
                    self._log.remove(earlier)
            operation.before.clear()
            done = [o for o in self._log if o.is_done and o.stream == _COLLECTIVE]
            newer = sum(o.num_bytes for o in done[1:])
            for earlier, following in itertools.pairwise(done):
                if newer < KEPT_BYTES:
                    break
                self._log.remove(earlier)
                newer -= following.num_bytes
            return
        self._log.remove(operation)
        if stream[0] == "receive":
            self._received[stream] = max(operation.number, self._received.get(stream, 0))
            return
        # the kernel has taken this send's last byte, so earlier bytes have arrived except for those in its buffers
        sent = self._sent[stream[1]]
        sent.append(operation)
        self._sent_bytes[stream[1]] += operation.num_bytes
        while self._sent_bytes[stream[1]] - sent[0].num_bytes >= KEPT_BYTES:
            self._sent_bytes[stream[1]] -= sent.popleft().num_bytes

    # the steps of a move, called by the thread of moves.py

    def begin_move(self) -> None:
        """Hold back new operations until the move is over."""
        with self._junction.changed:
            self.is_moving = True
            self._junction.changed.notify_all()

    def end(self) -> None:
        """End the connection, after gloo's sockets were shut down: complete the operations that have arrived, and abandon the rest."""
        changed, limit = self._junction.changed, timedelta(seconds=_ENDED_S)
        self._side.begin_end(self.forwarded)
        with changed:
            pending = [
                operation for operation in self._log if operation.work is not None
            ]  # including completed operations that were repeated
            waits = [o.waiting or self._junction.wait_apart(o.work, limit) for o in pending]
            works = [o.work for o in pending]
            for sent in itertools.chain(*self._sent.values()):
                sent.work = None
            all_over = changed.wait_for(lambda: all(waiting.is_over for waiting in waits), timeout=_ENDED_S)
            for operation, waiting in zip(pending, waits, strict=True):
                operation.work = operation.waiting = None
                # a thread that waits for the operation may have completed it already
                if waiting.is_over and waiting.error is None and not operation.is_done:
                    with self._side.after(operation.mark, waits=True):
                        self._complete(operation)
            if not all_over:
                leave_for_good(self.forwarded)
        self._side.end(self.forwarded, works)
        del works
        self.forward_to(None)

    def progress(self) -> dict[str, Any]:
        """This member's progress, as plain data: the number of collectives completed without a gap, and of receives by peer and tag.

        Raises:
            ConnectionLostError: a receive has ended before an earlier one of the same peer and tag.
        """
        for operation in self._log:
            if operation.stream[0] == "receive" and operation.number < self._received.get(operation.stream, 0):
                raise ConnectionLostError(f"tensors in the group {self.group_desc} have not arrived in their order")
        open_ones = [o.number for o in self._log if o.stream == _COLLECTIVE and not o.is_done]
        done = min(open_ones) - 1 if open_ones else self._issued.get(_COLLECTIVE, 0)
        return {"collectives": done, "received": [[peer, tag, n] for (_, peer, tag), n in self._received.items()]}

    def reconnect(self, store: Any) -> None:
        """Connect over the cards that are chosen now. All members must call, with the same new prefix of the store."""
        self.forward_to(self.connect(store))

    def repeat(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Repeat the operations that some member is missing, in their original order; then the group can be used again.

        Args:
            members: the progress of each member, by its rank in the group.

        Raises:
            ConnectionLostError: an operation that must be repeated is not kept any more.
        """
        first = min(member["collectives"] for member in members) + 1
        arrived = {
            (peer, tag): n
            for peer, member in enumerate(members)
            for me, tag, n in member["received"]
            if me == self.rank()
        }
        self._check_kept(first, arrived)
        changed = self._junction.changed
        with changed:
            self._moves += 1
            known = [*itertools.chain(*self._sent.values()), *self._log]
            for operation in sorted(known, key=lambda o: o.number):  # sends are kept in the order of their waits
                kind, peer, tag = operation.stream
                if kind == "send" and operation.number <= arrived.get((peer, tag), 0):
                    if not operation.is_done:
                        self._complete(operation)
                elif kind != "collective" or operation.number >= first:
                    with self._side.after(operation.mark):
                        self._issue(operation)
            self.is_moving = False
            changed.notify_all()

    def _check_kept(self, first: int, arrived: Mapping[tuple[int, int], int]) -> None:
        needed: list[tuple[tuple[str, int, int], int]] = [
            (_COLLECTIVE, n) for n in range(first, self._issued.get(_COLLECTIVE, 0) + 1)
        ]
        for stream, issued in self._issued.items():
            if stream[0] == "send":
                needed += [(stream, n) for n in range(arrived.get(stream[1:], 0) + 1, issued + 1)]
        everything = itertools.chain(self._log, *self._sent.values())
        kept = {(operation.stream, operation.number) for operation in everything}
        missing = [place for place in needed if place not in kept]
        if missing:
            (kind, peer, _), number = missing[0]
            what = f"collective {number}" if kind == "collective" else f"tensor {number} to member {peer}"
            raise ConnectionLostError(
                f"{what} of the group {self.group_desc} would have to be repeated, and is not kept any more"
            )

    def lose(self, error: Exception) -> None:
        """Fail all pending and later operations with ``error``, after a move has failed."""
        changed = self._junction.changed
        with changed:
            self._lost = error
            for operation in self._log:
                if not operation.is_done:
                    operation.work, operation.waiting = _Failed(error), None
            self.is_moving = False
            changed.notify_all()


class MovableWork(dist.Work):
    """An operation of a movable group."""

    def __init__(self, group: MovableGroup, operation: _Operation) -> None:
        super().__init__()
        self._group = group
        self._operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done, including any repetition; raise as torch's works do."""
        return self._group.finish(self._operation, timeout)

    def is_completed(self) -> bool:
        """Whether the operation is done; with gloo true only once it has been waited for, as for gloo's sends and receives."""
        return self._group.has_ended(self._operation)


class _Failed:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, _: Any = None) -> bool:
        raise self._error


def _wait(work: Any, timeout: timedelta | None) -> Exception | None:
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except Exception as error:
        return error
    return None


def _take(tensor: Tensor, came: Tensor) -> None:
    tensor.detach().copy_(came)
    if came.is_cuda:  # it is freed now, and may have been allocated on another stream
        came.record_stream(torch.cuda.current_stream(came.device))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _size(value: Any) -> int:
    return _ABOUT_BYTES + sum(tensor.numel() * tensor.itemsize for tensor in _tensors(value))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_mapped(part, change) for part in value] if isinstance(value, (list, tuple)) else value


def _copied(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _blank(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.new_empty(tensor.shape))
