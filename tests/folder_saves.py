"""Save a checkpoint folder without a strategy, and stand in for the ranks of a job by threads."""

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import in_threads

from lightning_holmes.checkpoint import Membership
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.parts import items_of
from lightning_holmes.checkpoint.saving import FolderSave


def save_folder(
    path: Path,
    values: Mapping[Any, Any],
    *,
    job: Membership | None = None,
    systems: Sequence[int] = (0,),
    order: Sequence[str] | None = None,
    rest: bytes = b"rest",
    token: str | None = None,
    plan: str = "",
) -> None:
    """Save ``values``, this rank's, as a folder."""
    names = [name[1] for name in values if name[0] == "state_dict"]
    FolderSave(
        target=path,
        token=token or uuid.uuid4().hex[:8],
        file_systems=FileSystems(of_rank=tuple(systems)),
        items=items_of(values),
        order=names if order is None else order,
        num_optimizers=int(any(name[0] == "optimizer_0" for name in values)),
        rest=rest,
        plan=plan,
    ).run(job or Membership())


class Threads:
    """Ranks that exchange values, each in a thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._board: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._board[rank] = value
        self._barrier.wait(10)
        found = list(self._board)
        self._barrier.wait(10)
        return found

    def run(self, run: Callable[[Membership], Any]) -> list[Any]:
        """Return the result or exception of each rank."""
        return in_threads(self._size, lambda rank: run(_OfThreads(self, rank, self._size)), timeout_s=30)


class _OfThreads(Membership):
    def __init__(self, threads: Threads, rank: int, size: int) -> None:
        super().__init__(rank=rank, size=size)
        object.__setattr__(self, "threads", threads)

    def all_gather(self, value: Any) -> list[Any]:
        return self.threads.gather(self.rank, value)  # type: ignore[attr-defined]

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]
