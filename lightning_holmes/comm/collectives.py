"""Ways to sum a flat tensor over a group of ranks. Each gives the sum; they differ in what they send, and when.

A bucket of gradients is summed in place by ``collective.sum(tensor)``. Or in two halves: after ``scatter`` the rank at
place r has the sum in the r-th part of the tensor, and ``gather`` brings every part to all. Which collective is the
fastest depends on the backend: gloo's reduce_scatter sends as much as its all_reduce does (torch 2.13 makes it of one),
NCCL's half of it. That is why they are measured (collective_timing.py).

    candidates = make_collectives(groups)                       # by name
    candidates["hierarchical"].sum(bucket.buffer)               # every rank of the group must call

Shapes: n elements, a multiple of the number of members.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.compression import Compressor
from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming
from lightning_holmes.comm.nccl import NCCL

COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "p2p", "hierarchical")

# torch 2.13 gave them these names, and warns of the old ones
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroups:
    """The groups over which a rank's gradients are summed; nothing else goes over them where the backend is gloo.

    Attributes:
        whole: the ranks with the same parameters.
        host: the same, by gloo, for what hosts know (flags, weights of microbatches): no device is waited for.
        ranks: their global ranks, in the order of their places.
        crosses: they are in several clusters.
        inside, across: where ``whole`` crosses clusters and has as many members, two or more, in each: those of this
            rank's cluster; and those at its place in each cluster.
        describe: a group in words, for messages.
    """

    whole: dist.ProcessGroup
    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    crosses: bool = False
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    describe: Callable[[dist.ProcessGroup | None], str] = str

    def naming(self, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Around what goes over one of the groups: a connection that is lost is told with its name."""
        return naming(lambda: f"on rank {dist.get_rank()} while gradients were summed in {self.describe(group)}")

    @property
    def size(self) -> int:
        """Members of ``whole``."""
        return len(self.ranks)


class Collective(Protocol):
    """Sums a 1-D tensor over a group, in place; all members must call, in the same order."""

    @property
    def name(self) -> str: ...

    def sum(self, tensor: Tensor) -> None:
        """Every element becomes the sum over the members."""

    def scatter(self, tensor: Tensor) -> None:
        """The part of ``tensor`` at this rank's place becomes the sum; what the others hold then is undefined."""

    def gather(self, tensor: Tensor) -> None:
        """Every part becomes what the rank at its place holds there."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The backend's own all_reduce."""

    group: dist.ProcessGroup
    name: str = "all_reduce"

    def sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def scatter(self, tensor: Tensor) -> None:
        self.sum(tensor)

    def gather(self, tensor: Tensor) -> None:
        _native_gather(tensor, self.group)


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """The backend's own reduce_scatter, then its all_gather."""

    group: dist.ProcessGroup
    name: str = "reduce_scatter"

    def sum(self, tensor: Tensor) -> None:
        self.scatter(tensor)
        self.gather(tensor)

    def scatter(self, tensor: Tensor) -> None:
        part = _part(tensor, self.group)
        summed = torch.empty_like(part)
        _reduce_scatter(summed, tensor, group=self.group)
        part.copy_(summed)

    def gather(self, tensor: Tensor) -> None:
        _native_gather(tensor, self.group)


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Reduce-scatter and all-gather by messages: every member sends each other one its part, which that one sums."""

    group: dist.ProcessGroup
    name: str = "p2p"

    def sum(self, tensor: Tensor) -> None:
        self.scatter(tensor)
        self.gather(tensor)

    def scatter(self, tensor: Tensor) -> None:
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = tensor.view(size, -1)
        received = torch.empty_like(parts)
        if dist.get_backend(self.group) == NCCL:  # forwards no batches of sends and receives, and NCCL hangs without
            dist.all_to_all_single(received, parts, group=self.group)
            torch.sum(received, dim=0, out=parts[place])
            return
        self._exchange(lambda peer: parts[peer], lambda peer: received[peer])
        received[place].copy_(parts[place])
        torch.sum(received, dim=0, out=parts[place])  # by one rank, in one order: all get the same

    def gather(self, tensor: Tensor) -> None:
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = tensor.view(size, -1)
        if dist.get_backend(self.group) == NCCL:
            return _native_gather(tensor, self.group)
        self._exchange(lambda peer: parts[place], lambda peer: parts[peer])

    def _exchange(self, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> None:
        """Send to every other member, and receive from it, all at once; in turns, so that no member is overrun."""
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        operations = []
        for distance in range(1, size):
            to, source = (place + distance) % size, (place - distance) % size
            operations.append(dist.P2POp(dist.irecv, received(source), group=self.group, group_peer=source))
            operations.append(dist.P2POp(dist.isend, sent(to), group=self.group, group_peer=to))
        for work in dist.batch_isend_irecv(operations):
            wait_for(work, self.group)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Reduce-scatter inside each cluster, all-reduce of the parts across clusters, all-gather inside.

    Each byte crosses once for each cluster, not for each member; inside, ``level`` moves them.
    """

    level: Collective
    inside: dist.ProcessGroup
    across: Callable[[Tensor], None]
    whole: dist.ProcessGroup
    name: str = "hierarchical"

    def sum(self, tensor: Tensor) -> None:
        self.level.scatter(tensor)
        self.across(_part(tensor, self.inside))
        self.level.gather(tensor)

    def scatter(self, tensor: Tensor) -> None:
        self.sum(tensor)

    def gather(self, tensor: Tensor) -> None:
        _native_gather(tensor, self.whole)


@dataclass(frozen=True, slots=True)
class Named:
    """``collective``, over ``group`` of ``groups``, whose lost connections are told with the group's name."""

    collective: Collective
    groups: SyncGroups
    group: dist.ProcessGroup

    @property
    def name(self) -> str:
        return self.collective.name

    def sum(self, tensor: Tensor) -> None:
        with self.groups.naming(self.group):
            self.collective.sum(tensor)

    def scatter(self, tensor: Tensor) -> None:
        with self.groups.naming(self.group):
            self.collective.scatter(tensor)

    def gather(self, tensor: Tensor) -> None:
        with self.groups.naming(self.group):
            self.collective.gather(tensor)


@dataclass(frozen=True, slots=True)
class Compressed:
    """``collective`` on gradients in fewer bits."""

    collective: Collective
    compressor: Compressor

    @property
    def name(self) -> str:
        return self.collective.name

    def sum(self, tensor: Tensor) -> None:
        self.compressor.sum(tensor, self.collective.sum)

    def scatter(self, tensor: Tensor) -> None:
        self.sum(tensor)

    def gather(self, tensor: Tensor) -> None:
        self.collective.gather(tensor)  # parameters, which are sent as they are


def rehearsal(collective: Collective) -> Collective:
    """What sends the same and remembers nothing, to be measured."""
    if isinstance(collective, Compressed):
        return replace(collective, compressor=collective.compressor.rehearsal())
    return collective


def _part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


def _native_gather(tensor: Tensor, group: dist.ProcessGroup) -> None:
    _all_gather(tensor, _part(tensor, group).clone(), group=group)
