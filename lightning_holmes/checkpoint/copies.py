"""Copies: each rank's file of a snapshot is also kept on another host, so that the loss of one host loses no state.

    copies = Copies(group, partner_of(systems.of_rank, clusters))
    copies(folder, folder / "__3_0.distcp")     # every rank must call, possibly in a thread: no other code uses the group

saving.py writes the files and loading.py uses the copies: a file is used wherever it is found.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.checkpoint.folder import part_file
from lightning_holmes.comm.file_space import reserve
from lightning_holmes.comm.gloo import wait_for

_SIZE, _BYTES = 1, 2  # tags of messages
_NOTHING = -1


def partner_of(file_systems: Sequence[int], clusters: Sequence[int]) -> list[int | None]:
    """For each rank, the rank that keeps a copy of its file: on another file system, and in another cluster if there is one, since a
    cluster can be lost as a whole. None if all ranks share one file system.

    Args:
        file_systems: the number of each rank's file system.
        clusters: the number of each rank's cluster.
    """
    members: dict[int, list[int]] = {}
    for rank, system in enumerate(file_systems):
        members.setdefault(system, []).append(rank)
    found: list[int | None] = []
    for rank, system in enumerate(file_systems):
        ring = [(system + step) % len(members) for step in range(1, len(members))]
        cluster = clusters[rank]
        elsewhere = [other for other in ring if clusters[members[other][0]] != cluster]
        number = sum(clusters[members[other][0]] == cluster for other in range(system))  # host's index in its cluster
        chosen = elsewhere[number % len(elsewhere)] if elsewhere else next(iter(ring), None)
        place = members[system].index(rank)
        found.append(None if chosen is None else members[chosen][place % len(members[chosen])])
    return found


class Copies:
    """Exchanges files between partners.

    Args:
        group: a gloo group of all ranks that no other code uses.
        partners: the result of :func:`partner_of`.
    """

    def __init__(self, group: Any, partners: Sequence[int | None]) -> None:
        self._group = group
        self._partners = partners

    def senders(self, rank: int) -> list[int]:
        """The ranks whose files ``rank`` keeps."""
        return [other for other, partner in enumerate(self._partners) if partner == rank]

    def __call__(self, folder: Path, file: Path) -> None:
        """Send ``file``, if it exists, to the partner, and write the files received from :meth:`senders` into ``folder``. All ranks must call.

        Raises:
            OSError: a file cannot be written.
            RuntimeError: a partner is gone.
        """
        rank = dist.get_rank()
        size = file.stat().st_size if file.is_file() else _NOTHING
        sent = torch.tensor([size])
        partner = self._partners[rank]
        works = []
        if partner is not None:
            works.append(dist.isend(sent, partner, group=self._group, tag=_SIZE))
            if size > 0:
                data = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
                works.append(dist.isend(data, partner, group=self._group, tag=_BYTES))
        problem: OSError | None = None
        for sender in self.senders(rank):
            expected = torch.empty(1, dtype=torch.int64)
            wait_for(dist.irecv(expected, sender, group=self._group, tag=_SIZE), self._group)
            count = int(expected)
            target = folder / part_file(sender)
            try:
                received = _room_for(target, count)
            except OSError as error:
                problem, received = error, torch.empty(max(count, 0), dtype=torch.uint8)
            if count > 0:
                wait_for(dist.irecv(received, sender, group=self._group, tag=_BYTES), self._group)
        for work in works:
            wait_for(work, self._group)
        if problem is not None:
            raise problem


def _room_for(path: Path, size: int) -> torch.Tensor:
    """Make a file of ``size`` bytes and return it as a memory-mapped tensor, to receive into it directly. Raises OSError if no space is left."""
    if size <= 0:
        path.touch()
        return torch.empty(0, dtype=torch.uint8)
    with path.open("wb") as file:
        reserve(file.fileno(), size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
