"""Unit: parameters that lie side by side in one flat tensor, and are gathered, reduced and saved together; and the pieces into which units
are cut for the data-parallel ranks that update them.

    unit = side_by_side({"head": head, "body": body}, multiple_of=2)      # 10 and 6 elements
    unit.views(flat)["body"]                # a parameter in a tensor of the unit's size
    cut_by_elements([unit], 2)              # rank 0: head[0:8]; rank 1: head[8:10], body[0:6]
    cut_by_parameters([unit], 2)            # rank 0: head; rank 1: body
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_holmes.comm import dtensor

_NOTHING = torch.zeros(0)
_CHUNK = 2**22  # elements that are converted at a time: what is made beside them stays in a GPU's cache


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Parameters of one type that lie side by side.

    Attributes:
        names, shapes, starts: for each parameter, its name, the shape of this rank's part of it and its first element in the unit.
        numel: the number of elements with padding; a multiple of the number of replicas.
        dtype, device: the parameters'.
        stage: the stage that reads the parameters; None: several stages do, or a small one.
        ranks: the pipeline ranks that share the parameters; () if only one holds them.
        is_trained: whether a parameter had requires_grad when they were laid out, or later.
        has_masters: whether their owner holds and steps them in fp32, and they are rounded from that.
        values: the parameters, (numel,), or (numel / replicas,) if each replica holds its share; empty while they lie elsewhere.
        gradient: their gradients, of the same size, or None before the first reduction; elements without a parameter are zero. They are
            summed in :func:`sum_dtype`, and may be rounded for the optimizer (:meth:`round_gradient`).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    stage: int | None = None
    ranks: tuple[int, ...] = ()
    is_trained: bool = True
    has_masters: bool = False
    values: Tensor = field(default_factory=lambda: _NOTHING)
    gradient: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in ``flat``, (numel,), by name."""
        return {
            name: flat[start : start + shape.numel()].view(shape)
            for name, start, shape in zip(self.names, self.starts, self.shapes, strict=True)
        }

    def round_gradient(self) -> None:
        """Give the gradient the narrower type of the parameters, in the memory of the sums, which are gone then."""
        if self.gradient is not None and self.gradient.dtype != self.dtype:
            sums, numel = self.gradient, self.gradient.numel()
            self.gradient = sums.view(self.dtype)[:numel]
            for target, source in zip(torch.split(self.gradient, _CHUNK), torch.split(sums, _CHUNK), strict=True):
                target.copy_(source.to(self.dtype))  # what is written lies where it has been read already

    def is_like(self, other: "Unit") -> bool:
        """Whether ``other`` has the same parameters in the same layout, and as much of them here."""
        mine, theirs = ((u.names, u.starts, u.numel, u.dtype, u.values.numel()) for u in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        return f"{self.names[0]} to {self.names[-1]}"


def side_by_side(
    parameters: Mapping[str, Tensor], *, multiple_of: int, stage: int | None = None, ranks: tuple[int, ...] = ()
) -> Unit:
    """Lay parameters of one type out one after the other; the unit's length is the next multiple of ``multiple_of``."""
    first = next(iter(parameters.values()))
    shapes = tuple(dtensor.local_part(parameter).shape for parameter in parameters.values())
    *starts, end = itertools.accumulate((shape.numel() for shape in shapes), initial=0)
    return Unit(
        names=tuple(parameters),
        shapes=shapes,
        starts=tuple(starts),
        numel=-(-end // multiple_of) * multiple_of,
        dtype=first.dtype,
        device=first.device,
        stage=stage,
        ranks=ranks,
        is_trained=first.requires_grad,
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of ``dtype`` accumulate and are summed: fp32; double precision and complex types stay."""
    return dtype if dtype.itemsize > 4 or dtype.is_complex else torch.float32


def adopt(master: Tensor, now: Tensor) -> None:
    """Give ``master``, 1-D in fp32, the values of ``now`` wherever it does not round to them: something else has written these."""
    for own, value in zip(torch.split(master, _CHUNK), torch.split(now, _CHUNK), strict=True):
        torch.where(own.to(value.dtype) == value, own, value.to(own.dtype), out=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``stop`` of the flattened parameter ``name``, which data-parallel rank ``rank`` updates;
    they begin at ``offset`` of the unit with the number ``unit``."""

    name: str
    start: int
    stop: int
    rank: int
    unit: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def cut_by_elements(units: Sequence[Unit], num_ranks: int, *, first: int = 0) -> list[Piece]:
    """Cut each unit, numbered from ``first`` on, into ``num_ranks`` equal parts, and these at the bounds of parameters.

    Pieces are in the order of units, and of their places there; a parameter without elements has one empty piece.
    """
    pieces = []
    for index, unit in enumerate(units, start=first):
        share, rest = divmod(unit.numel, num_ranks)
        assert rest == 0
        for name, begin, size in zip(unit.names, unit.starts, unit.sizes, strict=True):
            start = 0
            while start < size or size == 0:
                rank = (begin + start) // share if share else 0
                stop = min(size, (rank + 1) * share - begin)
                rank = min(rank, num_ranks - 1)
                pieces.append(Piece(name=name, start=start, stop=stop, rank=rank, unit=index, offset=begin + start))
                start = stop
                if size == 0:
                    break
    return pieces


def cut_by_parameters(units: Sequence[Unit], num_ranks: int) -> list[Piece]:
    """Assign whole parameters so that ranks have about equally many elements, and a rank's part of a unit is contiguous.

    If the elements of all parameters are cut into ``num_ranks`` equal parts, a parameter goes to the rank whose part has its middle.
    """
    total = max(1, sum(sum(unit.sizes) for unit in units))
    pieces, before = [], 0
    for index, unit in enumerate(units):
        for name, begin, size in zip(unit.names, unit.starts, unit.sizes, strict=True):
            rank = min(num_ranks - 1, (2 * before + size) * num_ranks // (2 * total))
            pieces.append(Piece(name=name, start=0, stop=size, rank=rank, unit=index, offset=begin))
            before += size
    return pieces


def deal_parameters(unit: Unit, num_ranks: int, *, index: int) -> list[Piece]:
    """Assign the whole parameters of the unit with the number ``index`` to ranks, and lay them out anew so that each rank's lie together.

    The unit gets ``num_ranks`` equal parts, each as long as the fullest rank needs. The largest parameters are assigned first, each to
    the rank that has the fewest elements.
    """
    loads = [0] * num_ranks
    held: dict[str, tuple[int, int]] = {}
    for name, size in sorted(zip(unit.names, unit.sizes, strict=True), key=lambda entry: -entry[1]):  # stable
        rank = loads.index(min(loads))
        held[name] = rank, loads[rank]
        loads[rank] += size
    share = max(loads)
    unit.starts = tuple(rank * share + place for rank, place in map(held.__getitem__, unit.names))
    unit.numel = share * num_ranks
    return [
        Piece(name=name, start=0, stop=size, rank=held[name][0], unit=index, offset=start)
        for name, start, size in zip(unit.names, unit.starts, unit.sizes, strict=True)
    ]


def holders_of(names: Iterable[str], pieces: Iterable[Piece], size: int) -> dict[str, int]:
    """Return for each parameter which of ``size`` ranks collects it: one that holds at least half as much of it as any other rank; if several
    do, they take turns."""
    held = {name: [0] * size for name in names}
    for piece in pieces:
        held[piece.name][piece.rank] += max(1, piece.numel)
    found = {}
    for number, (name, numels) in enumerate(held.items()):
        much = [rank for rank, numel in enumerate(numels) if 2 * numel >= max(numels)]
        found[name] = much[number % len(much)]
    return found
