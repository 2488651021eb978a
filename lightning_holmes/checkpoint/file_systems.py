"""Find which ranks see the same folder: clusters, and even hosts, need not share a file system.

A rank writes a file with a unique name, and all ranks look for it.
"""

import os
import socket
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.errors import CheckpointError

PROBE = ".probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystems:
    """``of_rank[rank]`` is the number of the rank's file system; the lowest rank on each file system is its leader."""

    of_rank: tuple[int, ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank on each file system; it makes and removes folders for those that share it."""
        return tuple(self.of_rank.index(number) for number in range(max(self.of_rank) + 1))


def find_file_systems(folder: Path, member: Membership) -> FileSystems:
    """Make ``folder`` on every file system, and find which ranks share one; all ranks must call.

    Raises:
        CheckpointError: a rank cannot write to the folder.
    """
    of_rank: list[int | None] = [None] * member.size
    for number in range(member.size):
        if None not in of_rank:
            break
        seen = _who_sees(folder, member, of_rank.index(None))
        of_rank = [number if known is None and sees else known for known, sees in zip(of_rank, seen, strict=True)]
    return FileSystems(of_rank=tuple(system for system in of_rank if system is not None))


def _who_sees(folder: Path, member: Membership, leader: int) -> list[bool]:
    """For each rank whether it sees a file that rank ``leader`` makes in ``folder``. All ranks must call."""
    probe = folder / f"{_of_host()}{os.getpid()}-{uuid.uuid4().hex}"
    rank, problem = member.rank, ""
    try:
        if rank == leader:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for former in folder.glob(f"{_of_host()}*"):
                    if not psutil.pid_exists(int(former.name.split("-")[2])):  # killed before it removed its file
                        atomic.delete(former)
                probe.touch()
            except OSError as error:
                problem = f"rank {rank} cannot write to {folder}: {error}"
        name, problem = member.all_gather((probe.name, problem))[leader]
        seen: list[bool] = member.all_gather(not problem and (rank == leader or _sees(folder, name)))
        member.all_gather(None)  # after this, no rank is still looking for the file
    finally:
        if rank == leader and not problem:
            atomic.delete(probe)
    if problem:
        raise CheckpointError(f"{problem}; give a dirpath that can be written everywhere")
    return seen


def _of_host() -> str:
    """The prefix of the names of probe files that processes of this host write."""
    return f"{PROBE}-{zlib.crc32(socket.gethostname().encode()):08x}-"


def _sees(folder: Path, name: str) -> bool:
    try:
        return name in os.listdir(folder)  # list the folder: network file systems cache that a name did not exist
    except OSError:
        return False
