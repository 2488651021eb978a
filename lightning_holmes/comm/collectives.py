"""Ways to sum a flat tensor over a group of ranks. All give the sum; they differ in what they send, and when.

A bucket of gradients is summed in place by ``collective.sum(tensor)``, or in two halves: after ``scatter`` the rank at
place r holds the sum of the r-th part of the tensor, and ``gather`` copies every part to all ranks. Which collective is
fastest depends on the backend: gloo's reduce_scatter sends as much as its all_reduce (torch 2.13 implements it by an
all_reduce), NCCL's sends half as much. The plan says which one a group uses (plan/collective_choice.py).

    collective = make_collective("hierarchical", groups)
    collective.sum(bucket.buffer)                               # every rank of the group must call

Shapes: a tensor has n elements, where n is a multiple of the number of members.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming
from lightning_holmes.comm.queue import use_here

COMPRESSIONS = {"bf16": torch.bfloat16}
"""The dtypes to which what crosses between clusters can be rounded, by the names of HolmesStrategy's ``compression``."""

# the names since torch 2.13, which warns of the old ones
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroups:
    """The groups over which a rank's gradients are summed; with gloo nothing else uses them.

    Attributes:
        whole: the ranks with the same parameters.
        host: a gloo group of the same ranks for values on the host (flags, weights of microbatches), so that no device
            is waited for.
        ranks: their global ranks, in group order.
        crosses: the ranks are in several clusters.
        inside, across: if ``whole`` crosses clusters and has the same number of members, two or more, in each: the
            group of the members in this rank's cluster, and the group of the members at this rank's place in each
            cluster. Else None.
        describe: returns the description of a group for messages.
    """

    whole: dist.ProcessGroup
    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    crosses: bool = False
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    describe: Callable[[dist.ProcessGroup | None], str] = str

    def naming(self, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Turn a connection that is lost inside into a ConnectionLostError that names ``group``."""
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
        """Replace every element by its sum over the members."""

    def scatter(self, tensor: Tensor) -> None:
        """Replace the part of ``tensor`` at this rank's place by its sum over the members; the other parts are undefined afterwards."""

    def gather(self, tensor: Tensor) -> None:
        """Replace every part of ``tensor`` by the one that the rank at its place holds."""


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
        summed = part if _works_in_place(self.group) else torch.empty_like(part)
        _reduce_scatter(summed, tensor, group=self.group)
        if summed is not part:
            part.copy_(summed)

    def gather(self, tensor: Tensor) -> None:
        _native_gather(tensor, self.group)


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Reduce-scatter and all-gather by sends and receives: each member receives its part from all others, and sums it. ``tag``: with gloo,
    another thread may use the group at the same time with another one."""

    group: dist.ProcessGroup
    name: str = "p2p"
    tag: int = 0

    def sum(self, tensor: Tensor) -> None:
        self.scatter(tensor)
        self.gather(tensor)

    def scatter(self, tensor: Tensor) -> None:
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = tensor.view(size, -1)
        received = torch.empty_like(parts)
        self._exchange(lambda peer: parts[peer], lambda peer: received[peer])
        received[place].copy_(parts[place])
        torch.sum(received, dim=0, out=parts[place])  # summed once, in one order: all ranks get the same bits

    def gather(self, tensor: Tensor) -> None:
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = tensor.view(size, -1)
        self._exchange(lambda peer: parts[place], lambda peer: parts[peer])

    def _exchange(self, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> None:
        """Exchange a tensor with every other member, all in one batch; each member begins with another peer, so that none is overrun."""
        place, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        operations = []
        for distance in range(1, size):
            to, source = (place + distance) % size, (place - distance) % size
            operations.append(
                dist.P2POp(dist.irecv, received(source), group=self.group, group_peer=source, tag=self.tag)
            )
            operations.append(dist.P2POp(dist.isend, sent(to), group=self.group, group_peer=to, tag=self.tag))
        for work in dist.batch_isend_irecv(operations):
            wait_for(work, self.group)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Reduce-scatter inside each cluster, all-reduce of the parts across clusters, all-gather inside.

    Each byte crosses clusters once per cluster, not once per member; ``level`` moves bytes inside a cluster.
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
    """``collective`` over ``group`` of ``groups``, whose lost connections are raised with the group's name."""

    collective: Collective
    groups: SyncGroups
    group: dist.ProcessGroup

    @property
    def name(self) -> str:
        return self.collective.name

    def sum(self, tensor: Tensor) -> None:
        with self._using(tensor):
            self.collective.sum(tensor)

    def scatter(self, tensor: Tensor) -> None:
        with self._using(tensor):
            self.collective.scatter(tensor)

    def gather(self, tensor: Tensor) -> None:
        with self._using(tensor):
            self.collective.gather(tensor)

    def _using(self, tensor: Tensor) -> AbstractContextManager[None]:
        use_here(tensor)
        return self.groups.naming(self.group)


@dataclass(frozen=True, slots=True)
class Rounded:
    """``collective`` on gradients that are rounded to ``dtype``, and summed in it; not exact."""

    collective: Collective
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.collective.name

    def sum(self, tensor: Tensor) -> None:
        sum_rounded(tensor, self.dtype, self.collective.sum)

    def scatter(self, tensor: Tensor) -> None:
        self.sum(tensor)

    def gather(self, tensor: Tensor) -> None:
        self.collective.gather(tensor)  # parameters, which are not rounded


def make_collective(name: str, groups: SyncGroups, rounded: torch.dtype | None = None) -> Collective:
    """Make the collective ``name`` for a group; tensors that cross clusters are rounded to ``rounded`` (None: not at all).

    "hierarchical" is for groups with the levels ``inside`` and ``across``.
    """
    kinds: dict[str, type[Any]] = {"all_reduce": AllReduce, "reduce_scatter": ReduceScatter, "p2p": PointToPoint}
    if name != "hierarchical":
        whole = Named(kinds[name](groups.whole), groups, groups.whole)
        return whole if rounded is None or not groups.crosses else Rounded(whole, rounded)
    assert groups.inside is not None and groups.across is not None
    across = Named(AllReduce(groups.across), groups, groups.across)

    def sum_across(part: Tensor) -> None:
        if rounded is None:
            across.sum(part)
        else:
            sum_rounded(part, rounded, across.sum)

    kind = kinds["reduce_scatter" if dist.get_backend(groups.inside) == "nccl" else "p2p"]
    level = Named(kind(groups.inside), groups, groups.inside)
    return Named(Hierarchical(level, groups.inside, sum_across, groups.whole), groups, groups.whole)


def sum_rounded(tensor: Tensor, dtype: torch.dtype, all_reduce: Callable[[Tensor], None]) -> None:
    """Sum ``tensor`` in place in ``dtype``, unless its own is as narrow; ``all_reduce`` sums exactly."""
    if tensor.dtype.itemsize <= dtype.itemsize:
        all_reduce(tensor)
        return
    rounded = tensor.to(dtype)
    all_reduce(rounded)
    tensor.copy_(rounded)


def _part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


def _native_gather(tensor: Tensor, group: dist.ProcessGroup) -> None:
    part = _part(tensor, group)
    _all_gather(tensor, part if _works_in_place(group) else part.clone(), group=group)


def _works_in_place(group: dist.ProcessGroup) -> bool:
    """Whether the part of a rank may lie at its place in the whole tensor, as NCCL allows for its in-place operations."""
    return bool(dist.get_backend(group) == "nccl")
