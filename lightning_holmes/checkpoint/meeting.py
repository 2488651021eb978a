"""Meeting: ranks agree about one checkpoint over the job's key-value store.

No process group takes part, so that files can be written in a thread while training uses the groups.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_holmes.errors import CheckpointError


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
            self._store.set(self._key(topic, self.rank), data)
            return []
        found = [data]
        for rank in range(1, self.size):
            found.append(self._take(self._key(topic, rank), f"rank {rank}"))
            self._store.delete_key(self._key(topic, rank))
        return found

    def announce(self, topic: str, data: bytes = b"") -> bytes:
        """What rank 0 gives, on every rank."""
        if self.size == 1:
            return data
        if self.rank == 0:
            self._store.set(self._key(topic, 0), data)
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
                self._store.delete_key(self._key(topic, 0))

    def _key(self, topic: str, rank: int) -> str:
        return f"holmes/checkpoint/{self._name}/{topic}/{rank}"

    def _take(self, key: str, who: str) -> bytes:
        try:
            self._store.wait([key], self._timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            seconds = self._timeout.total_seconds()
            raise CheckpointError(f"{who} has written nothing for {seconds:.0f} s, or is gone ({error})") from None
        return bytes(self._store.get(key))
