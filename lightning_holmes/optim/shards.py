"""The pieces into which parameters are cut, and the data-parallel rank that updates each piece. Plain data, no tensors.

extents = [Extent(names=("head", "body"), sizes=(10, 6), numel=16)]
cut_by_elements(extents, 2)      # rank 0: head[0:8]; rank 1: head[8:10], body[0:6]
cut_by_parameters(extents, 2)    # rank 0: head; rank 1: body
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The layout of one bucket: parameters of ``sizes`` elements, side by side from its beginning; ``numel`` includes
    padding."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``stop`` of the flattened parameter ``name``, which data-parallel rank ``rank`` updates;
    they begin at ``offset`` of bucket ``bucket``."""

    name: str
    start: int
    stop: int
    rank: int
    bucket: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def cut_by_elements(extents: Sequence[Extent], num_ranks: int, *, first: int = 0) -> list[Piece]:
    """Cut each bucket, numbered from ``first`` on, into ``num_ranks`` equal parts, and these at the bounds of parameters.

    Pieces are in the order of buckets, and of their places there; a parameter without elements has one empty piece.
    """
    pieces = []
    for index, extent in enumerate(extents, start=first):
        share, rest = divmod(extent.numel, num_ranks)
        assert rest == 0
        begin = 0
        for name, size in zip(extent.names, extent.sizes, strict=True):
            start = 0
            while start < size or size == 0:
                rank = (begin + start) // share if share else 0
                stop = min(size, (rank + 1) * share - begin)
                rank = min(rank, num_ranks - 1)
                pieces.append(Piece(name=name, start=start, stop=stop, rank=rank, bucket=index, offset=begin + start))
                start = stop
                if size == 0:
                    break
            begin += size
    return pieces


def cut_by_parameters(extents: Sequence[Extent], num_ranks: int) -> list[Piece]:
    """Assign whole parameters so that ranks have about equally many elements, and a rank's part of a bucket is contiguous.

    If the elements of all parameters are cut into ``num_ranks`` equal parts, a parameter goes to the rank whose part has its middle.
    """
    total = max(1, sum(sum(extent.sizes) for extent in extents))
    pieces, before = [], 0
    for index, extent in enumerate(extents):
        begin = 0
        for name, size in zip(extent.names, extent.sizes, strict=True):
            rank = min(num_ranks - 1, (2 * before + size) * num_ranks // (2 * total))
            pieces.append(Piece(name=name, start=0, stop=size, rank=rank, bucket=index, offset=begin))
            begin += size
            before += size
    return pieces


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


def cut_whole(names: Sequence[str], sizes: Sequence[int], num_ranks: int, *, bucket: int) -> tuple[list[Piece], int]:
    """Assign the whole parameters of one bucket to ranks; returns the pieces and the bucket's length.

    The bucket has ``num_ranks`` equal parts, each as long as the fullest rank needs. The largest parameters are assigned first, each to
    the rank that has the fewest elements.
    """
    loads = [0] * num_ranks
    held: dict[str, tuple[int, int]] = {}
    for name, size in sorted(zip(names, sizes, strict=True), key=lambda entry: -entry[1]):  # stable
        rank = loads.index(min(loads))
        held[name] = rank, loads[rank]
        loads[rank] += size
    share = max(loads)
    pieces = [
        Piece(
            name=name,
            start=0,
            stop=size,
            rank=held[name][0],
            bucket=bucket,
            offset=held[name][0] * share + held[name][1],
        )
        for name, size in zip(names, sizes, strict=True)
    ]
    return pieces, share * num_ranks
