"""The ranks of a pipeline in one process: each has a thread, and one of them runs at a time, until it waits for another.

    turns = Turns()
    ends = [LocalP2P(rank, 2, turns) for rank in range(2)]
    results = turns.run([lambda: first.run(request), lambda: second.run(request)])

Random generators and the trainer are the process's: they would be disturbed if two ranks ran at once.
"""

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_holmes.comm.p2p import PendingReceive, TensorSpec
from lightning_holmes.errors import HolmesError

_T = TypeVar("_T")


class Turns:
    """What the ranks of one process send each other, and which of them runs."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._sent: dict[Hashable, list[Any]] = collections.defaultdict(list)
        self._awaited: dict[int, tuple[Hashable, int]] = {}  # by thread, what it waits for
        self._num_active = 0
        self._failure: BaseException | None = None

    def run(self, acts: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run each of ``acts`` in a thread of its own, in turns, and return their results.

        Raises:
            HolmesError: all wait for each other.
        """
        results: dict[int, _T] = {}
        default = torch.get_default_device()  # each thread has its own

        def run(number: int) -> None:
            with self._turn, nullcontext() if default.type == "cpu" else default:
                try:
                    if self._failure is None:
                        results[number] = acts[number]()
                except BaseException as error:
                    self._failure = self._failure or error
                self._num_active -= 1
                self._turn.notify_all()

        self._num_active, self._failure = len(acts), None
        self._awaited.clear()
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[number] for number in range(len(acts))]

    def send(self, box: Hashable, value: Any) -> None:
        """Put a value in a box."""
        self._sent[box].append(value)
        self._turn.notify_all()

    def take(self, box: Hashable, number: int) -> Any:
        """The value that was or will be sent to a box as the one of this ``number``; other ranks run meanwhile."""
        self._awaited[threading.get_ident()] = box, number
        while not self._has(box, number):
            if self._failure is not None:
                raise HolmesError("another rank has failed")
            if len(self._awaited) == self._num_active and not any(self._has(*each) for each in self._awaited.values()):
                raise HolmesError("the stages wait for each other for ever; this is a fault of the schedule")
            self._turn.wait()
        del self._awaited[threading.get_ident()]
        value, self._sent[box][number] = self._sent[box][number], None
        return value

    def _has(self, box: Hashable, number: int) -> bool:
        return len(self._sent[box]) > number


class LocalP2P:
    """P2P between the ranks of one process."""

    broadcasts = False

    def __init__(self, rank: int, size: int, turns: Turns) -> None:
        self.rank = rank
        self.size = size
        self.turns = turns
        self._taken: collections.Counter[Hashable] = collections.Counter()

    def next_of(self, box: Hashable) -> int:
        """The number of the value in a box that this rank takes next."""
        self._taken[box] += 1
        return self._taken[box] - 1

    def send(self, destination: int, tensors: Sequence[Tensor]) -> None:
        self.turns.send((self.rank, destination), [t.detach().clone() for t in tensors])

    def prepare(self, source: int, specs: Sequence[TensorSpec]) -> PendingReceive:
        return _LocalReceive(self, (source, self.rank))

    def broadcast(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Do nothing: messages hold all tensors."""
        assert not tensors

    def send_message(self, destination: int, topic: int, message: Any) -> None:
        self.turns.send((self.rank, destination, topic), message)

    def post_message(self, destination: int, topic: int, message: Any) -> Callable[[], None]:
        self.send_message(destination, topic, message)
        return lambda: None

    def expect_message(self, source: int, topic: int) -> None:
        """Do nothing: nothing has to be prepared within one process."""

    def receive_message(self, source: int, topic: int) -> Any:
        box = source, self.rank, topic
        return self.turns.take(box, self.next_of(box))

    def finish(self) -> None:
        """Do nothing: nothing is in flight within one process."""


@dataclass(slots=True)
class _LocalReceive:
    p2p: LocalP2P
    box: Hashable
    number: int = -1

    def post(self) -> None:
        self.number = self.p2p.next_of(self.box)

    def wait(self) -> list[Tensor]:
        received: list[Tensor] = self.p2p.turns.take(self.box, self.number)
        return received
