"""Meeting: ranks agree about one checkpoint over the job's key-value store.

No process group takes part, so that files can be written in a thread while training uses the groups.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_holmes.comm.answer import answer_within
from lightning_holmes.errors import CheckpointError, ConnectionLostError

_T = TypeVar("_T")
_ANSWER_S = 2.0  # beyond the timeout of what is asked


class Meeting:
    """One save; every rank makes one with the same ``name``.

    Args:
        store: a client of the job's store of this thread's own; None in a job of one process.
        rank: this global rank.
        size: all ranks.
        name: this save's, used by no other.
        timeout: how long ranks wait for each other.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._timeout = timeout
        self._round = 0

    def gather(self, topic: str, data: bytes) -> Sequence[bytes]:
        """The data of all ranks on rank 0; nothing on the others."""
        if self.size == 1:
            return [data]
        if self.rank != 0:
            self._put(self._key(topic, self.rank), data)
            return []
        found = [data]
        for rank in range(1, self.size):
            key = self._key(topic, rank)
            found.append(self._take(key, f"rank {rank}"))
            self._delete(key)
        return found

    def announce(self, topic: str, data: bytes = b"") -> bytes:
        """What rank 0 gives, on every rank."""
        if self.size == 1:
            return data
        if self.rank == 0:
            self._put(self._key(topic, 0), data)
            return data
        return self._take(self._key(topic, 0), "rank 0")

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, plain data, on every rank."""
        self._round += 1
        gathered = self.gather(f"values {self._round}", json.dumps(value).encode())
        everyone = [json.loads(data) for data in gathered]
        found: list[Any] = json.loads(self.announce(f"all values {self._round}", json.dumps(everyone).encode()))
        return found

    def forget(self, topics: Sequence[str]) -> None:
        """Take rank 0's announcements out of the store, once all ranks have read them."""
        if self.size > 1 and self.rank == 0:
            for topic in topics:
                self._delete(self._key(topic, 0))

    def _key(self, topic: str, rank: int) -> str:
        return f"holmes/checkpoint/{self._name}/{topic}/{rank}"

    def _put(self, key: str, data: bytes) -> None:
        self._ask(lambda: self._store.set(key, data), "the others")

    def _delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key), "the others")

    def _take(self, key: str, who: str) -> bytes:
        def wait_and_get() -> bytes:
            self._store.wait([key], self._timeout)
            return bytes(self._store.get(key))

        return self._ask(wait_and_get, who)

    def _ask(self, request: Callable[[], _T], who: str) -> _T:
        """What the store says, in time, whatever becomes of the way to it. Raises CheckpointError."""
        seconds = self._timeout.total_seconds()
        try:
            return answer_within(request, timeout_s=seconds + _ANSWER_S)
        except ConnectionLostError as error:
            raise CheckpointError(f"nothing is heard of {who}: {error}") from None
        except (dist.DistError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise CheckpointError(f"{who} has written nothing for {seconds:.0f} s, or is gone ({said})") from None
