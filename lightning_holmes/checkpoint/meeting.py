"""Meeting: ranks exchange messages about one checkpoint over the job's key-value store.

No process group is used, so that files can be written in a thread while training uses the groups.
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_holmes.comm.answer import answer_within
from lightning_holmes.errors import CheckpointError, ConnectionLostError

_T = TypeVar("_T")
_LOOK_S = 2.0
_ANSWER_S = 2.0  # added to the timeout of a request


class Meeting:
    """The messages of one save; every rank makes a Meeting with the same ``name``.

    Args:
        store: a client of the job's store that no other thread uses; None in a job of one process.
        rank: this global rank.
        size: the number of ranks.
        name: the name of this save, used by no other save.
        timeout: how long ranks wait for each other.
        has_ended: returns whether a rank's process is known to have ended, which ends the wait for it; called every two seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        has_ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._timeout = timeout
        self._has_ended = has_ended
        self._round = 0

    def gather(self, topic: str, data: bytes) -> Sequence[bytes]:
        """Return the data of all ranks on rank 0, nothing on the others."""
        if self.size == 1:
            return [data]
        if self.rank != 0:
            self._put(self._key(topic, self.rank), data)
            return []
        found = [data]
        for rank in range(1, self.size):
            key = self._key(topic, rank)
            found.append(self._take(key, rank))
            self._delete(key)
        return found

    def announce(self, topic: str, data: bytes = b"") -> bytes:
        """Return the data of rank 0 on every rank."""
        if self.size == 1:
            return data
        if self.rank == 0:
            self._put(self._key(topic, 0), data)
            return data
        return self._take(self._key(topic, 0), 0)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which must be JSON data, on every rank."""
        self._round += 1
        gathered = self.gather(f"values {self._round}", json.dumps(value).encode())
        everyone = [json.loads(data) for data in gathered]
        found: list[Any] = json.loads(self.announce(f"all values {self._round}", json.dumps(everyone).encode()))
        return found

    def forget(self, topics: Sequence[str]) -> None:
        """Delete rank 0's announcements from the store; call this once all ranks have read them."""
        if self.size > 1 and self.rank == 0:
            for topic in topics:
                self._delete(self._key(topic, 0))

    def _key(self, topic: str, rank: int) -> str:
        return f"holmes/checkpoint/{self._name}/{topic}/{rank}"

    def _put(self, key: str, data: bytes) -> None:
        self._ask(lambda: self._store.set(key, data), "the other ranks")

    def _delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key), "the other ranks")

    def _take(self, key: str, rank: int) -> bytes:
        end = time.monotonic() + self._timeout.total_seconds()

        def wait_and_get() -> bytes:
            while True:
                left_s = end - time.monotonic()
                try:
                    self._store.wait([key], timedelta(seconds=max(min(left_s, _LOOK_S), 0.001)))
                    return bytes(self._store.get(key))
                except dist.DistStoreError:  # the key was not set in time
                    if left_s <= _LOOK_S:
                        raise
                    if self._has_ended(rank):
                        raise CheckpointError(f"rank {rank} has written nothing, and its process has ended") from None

        return self._ask(wait_and_get, f"rank {rank}")

    def _ask(self, request: Callable[[], _T], who: str) -> _T:
        """Return the store's answer to ``request``; raise CheckpointError if it fails, or takes too long because the connection is lost."""
        seconds = self._timeout.total_seconds()
        try:
            return answer_within(request, timeout_s=seconds + _ANSWER_S)
        except CheckpointError:
            raise
        except ConnectionLostError as error:
            raise CheckpointError(f"nothing is heard of {who}: {error}") from None
        except (dist.DistError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise CheckpointError(f"{who} has written nothing for {seconds:.0f} s, or is gone ({said})") from None
