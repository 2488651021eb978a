"""Balance: assigns layers to stages so that the slowest rank is as fast as possible.

The objective, precisely: rank r holds the stages r, r + P, r + 2P, ... (P ranks, num_chunks stages each), or with v_shaped
the stages r, 2P - 1 - r, 2P + r, ... Its load is the seconds of the layers of its stages, plus before_seconds on the
rank of the first stage and after_seconds on the rank of the last stage.
The largest load is minimised; among the partitions that reach the minimum, the sum of the squared loads of the stages,
so that the remaining layers are spread evenly. Memory: the bytes of a rank's layers, plus before_bytes and
after_bytes, stay within its limit. No split point lies after a forbidden layer. Every stage has a layer.

    balance = Balance(seconds=((1.0,) * 10,) * 2, after_seconds=2.0)
    solve(balance)      # (6, 4)

Equal layers: exact, by assigning layer by layer to the rank that finishes first. Unequal layers with one chunk per rank:
exact, by dynamic programming over split points. Unequal layers with several chunks (the problem contains the NP-hard PARTITION
problem): the best that moving single split points from evenly filled stages leads to.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_holmes.errors import ConfigurationError

Array = npt.NDArray[Any]

_CLOSE = 1.0 + 1e-9  # loads within this factor count as equal, since prefix sums are rounded


class NothingFitsError(ConfigurationError):
    """No partition fits the memory limits. excess_bytes: by how much the best partition exceeds the limit of ``rank``."""

    # pickling needs the defaults
    def __init__(self, message: str, *, excess_bytes: float = 0.0, rank: int = 0) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes
        self.rank = rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The problem. seconds[rank][layer]; layer_bytes[stage][layer] and limits[rank] if memory is limited.

    Ranks of equal speed may share one tuple as their row.
    """

    seconds: tuple[tuple[float, ...], ...]
    before_seconds: float = 0.0
    after_seconds: float = 0.0
    num_chunks: int = 1
    layer_bytes: tuple[tuple[float, ...], ...] | None = None
    before_bytes: float = 0.0
    after_bytes: float = 0.0
    limits: tuple[float, ...] | None = None
    forbidden_cuts: tuple[int, ...] = ()
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert len({len(row) for row in (*self.seconds, *(self.layer_bytes or ()))}) == 1, "rows of unlike lengths"
        if self.layer_bytes is not None and self.limits is not None:
            assert len(self.layer_bytes) == self.num_stages and len(self.limits) == self.num_ranks
        if self.num_layers < self.num_stages:
            raise ConfigurationError(
                f"{self.num_layers} layers cannot fill {self.num_stages} stages (pipeline_parallel_size x num_chunks); "
                f"use at most {self.num_layers} stages"
            )

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.seconds)

    @property
    def num_layers(self) -> int:
        """The number of layers to assign."""
        return len(self.seconds[0])

    @property
    def num_stages(self) -> int:
        """The number of stages: pipeline ranks times chunks."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, one per chunk."""
        back = self.num_ranks - 1 - rank if self.v_shaped else rank
        return [chunk * self.num_ranks + (back if chunk % 2 else rank) for chunk in range(self.num_chunks)]

    def loads(self, counts: Sequence[int]) -> list[float]:
        """The load of each rank under a partition, in seconds."""
        return self._sums(counts, self.seconds, self.before_seconds, self.after_seconds)

    def memory(self, counts: Sequence[int]) -> list[float]:
        """Bytes of each rank under a partition; zeros if memory is not limited."""
        if self.layer_bytes is None:
            return [0.0] * self.num_ranks
        return self._sums(counts, self.layer_bytes, self.before_bytes, self.after_bytes)

    def _sums(self, counts: Sequence[int], rows: Sequence[Sequence[float]], before: float, after: float) -> list[float]:
        sums = [0.0] * self.num_ranks
        sums[0] += before
        sums[self.rank_of(self.num_stages - 1)] += after
        first = 0
        for stage, count in enumerate(counts):
            rank = self.rank_of(stage)
            row = rows[rank] if rows is self.seconds else rows[stage]
            sums[rank] += math.fsum(row[first : first + count])
            first += count
        return sums


def solve(balance: Balance) -> tuple[int, ...]:
    """Return the layers of each stage of the best partition. Raises NothingFitsError if none fits the memory, ConfigurationError if none avoids the
    forbidden split points."""
    if _all_alike(balance):
        counts = _solve_alike(balance)
    elif balance.num_chunks == 1:
        counts = _solve_one_chunk(balance)
    else:
        counts = _improve(balance, _start(balance))
        counts = None if counts is None or _excess(balance, counts)[0] > 0 else counts
    if counts is None:
        raise _nothing_fits(balance)
    return counts


# unequal layers, one chunk per rank


def _segments(balance: Balance, stage: int) -> tuple[Array, Array]:
    """(L+1, L+1) seconds of the layers [i, j) on a stage, inf if the stage may not hold them; and (L+1, L+1) bytes."""
    size, last = balance.num_layers, balance.num_stages - 1
    rank = balance.rank_of(stage)

    def sums(row: Sequence[float], before: float, after: float) -> Array:
        done = np.concatenate(([0.0], np.cumsum(row)))
        return done[None, :] - done[:, None] + (before * (stage == 0) + after * (stage == last))

    seconds = sums(balance.seconds[rank], balance.before_seconds, balance.after_seconds)
    used = np.zeros_like(seconds)
    if balance.layer_bytes is not None:
        used = sums(balance.layer_bytes[stage], balance.before_bytes, balance.after_bytes)
    allowed = np.triu(np.ones((size + 1, size + 1), dtype=bool), 1)
    for cut in balance.forbidden_cuts:
        allowed[cut + 1, :] = allowed[:, cut + 1] = False
    return np.where(allowed, seconds, np.inf), used


def _cut_layers(costs: Sequence[Array], *, add: bool) -> tuple[int, ...] | None:
    """Layer counts that minimise the largest (with ``add`` the summed) segment cost; None if every cost is infinite."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = 0.0 if add else -np.inf
    choices = []
    for cost in costs:
        total = np.where(np.isinf(cost), np.inf, best[:, None] + cost if add else np.maximum(best[:, None], cost))
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not best[-1] < np.inf:
        return None
    cuts = [size - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts.reverse()
    return tuple(after - before for before, after in itertools.pairwise(cuts))


def _solve_one_chunk(balance: Balance) -> tuple[int, ...] | None:
    costs = []
    for stage in range(balance.num_stages):
        seconds, used = _segments(balance, stage)
        if balance.limits is not None:
            seconds = np.where(used <= balance.limits[stage] * _CLOSE, seconds, np.inf)
        costs.append(seconds)
    counts = _cut_layers(costs, add=False)
    if counts is None:
        return None
    slowest = max(balance.loads(counts)) * _CLOSE
    even = _cut_layers([np.where(cost <= slowest, cost, np.inf) ** 2 for cost in costs], add=True)
    return even or counts


# equal layers, any number of chunks


def _all_alike(balance: Balance) -> bool:
    rows = (*balance.seconds, *(balance.layer_bytes or ()))
    return not balance.forbidden_cuts and all(len(set(row)) == 1 for row in {id(row): row for row in rows}.values())


def _solve_alike(balance: Balance) -> tuple[int, ...] | None:
    ranks, chunks = balance.num_ranks, balance.num_chunks
    each = [row[0] for row in balance.seconds]
    loads = [chunks * seconds for seconds in each]  # every stage has one layer to begin with
    loads[0] += balance.before_seconds
    loads[balance.rank_of(balance.num_stages - 1)] += balance.after_seconds
    most = [_most_layers(*_chunk_bytes(balance, rank), balance.num_layers) for rank in range(ranks)]
    if any(number < chunks for number in most) or sum(most) < balance.num_layers:
        return None
    held = [chunks] * ranks
    queue = [(loads[rank] + each[rank], -rank, rank) for rank in range(ranks) if most[rank] > chunks]
    heapq.heapify(queue)
    for _ in range(balance.num_layers - balance.num_stages):
        load, _, rank = heapq.heappop(queue)
        held[rank] += 1
        if held[rank] < most[rank]:
            heapq.heappush(queue, (load + each[rank], -rank, rank))
    counts = [0] * balance.num_stages
    for rank in range(ranks):
        for stage, count in zip(balance.stages_of(rank), _spread(balance, rank, held[rank]), strict=True):
            counts[stage] = count
    return tuple(counts)


def _chunk_bytes(balance: Balance, rank: int) -> tuple[list[float], float]:
    """Bytes of one layer in each chunk of a rank, and the bytes that all layers of the rank may take together."""
    if balance.layer_bytes is None or balance.limits is None:
        return [0.0] * balance.num_chunks, math.inf
    stages = balance.stages_of(rank)
    each = [balance.layer_bytes[stage][0] for stage in stages]
    fixed = (balance.before_bytes if 0 in stages else 0.0) + (
        balance.after_bytes if balance.num_stages - 1 in stages else 0.0
    )
    return each, balance.limits[rank] * _CLOSE - fixed


def _most_layers(each: list[float], room: float, num_layers: int) -> int:
    """How many layers fit a rank if each chunk has one layer and all others are in the chunk where they take the fewest bytes."""
    left = room - sum(each)
    if left < 0:
        return 0
    least = min(each)
    return num_layers if least == 0 else len(each) + min(int(left / least), num_layers)


def _spread(balance: Balance, rank: int, number: int) -> list[int]:
    """Layers of each chunk of a rank: spread evenly, unless they fit the memory only with more layers in a cheaper chunk."""
    each, room = _chunk_bytes(balance, rank)
    every, more = divmod(number, balance.num_chunks)
    # the middle chunks first, since the first and the last may also have the embedding and the head
    order = sorted(range(balance.num_chunks), key=lambda chunk: (chunk in (0, balance.num_chunks - 1), -chunk))
    counts = [every] * balance.num_chunks
    for chunk in order[:more]:
        counts[chunk] += 1
    cheapest = min(range(balance.num_chunks), key=lambda chunk: (each[chunk], -chunk))
    while math.fsum(count * size for count, size in zip(counts, each, strict=True)) > room:
        dear = max((c for c in range(balance.num_chunks) if counts[c] > 1 and c != cheapest), key=lambda c: each[c])
        counts[dear] -= 1
        counts[cheapest] += 1
    return counts


# unequal layers, several chunks


def _start(balance: Balance) -> tuple[int, ...] | None:
    """A partition that balances the stages, regardless of which rank they are on; None if forbidden split points leave none."""
    return _cut_layers([_segments(balance, stage)[0] for stage in range(balance.num_stages)], add=False)


def _excess(balance: Balance, counts: Sequence[int]) -> tuple[float, int]:
    """By how many bytes a partition exceeds its limit on the worst rank, and that rank; zero or less if it fits."""
    if balance.limits is None:
        return 0.0, 0
    used = balance.memory(counts)
    return max((used[rank] - balance.limits[rank] * _CLOSE, rank) for rank in range(balance.num_ranks))


def _improve(balance: Balance, counts: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Move one split point at a time while that improves memory, then the slowest rank, then evenness."""
    if counts is None:
        return None
    forbidden = set(balance.forbidden_cuts)

    def rate(candidate: Sequence[int]) -> tuple[float, float, float]:
        loads = balance.loads(candidate)
        return max(0.0, _excess(balance, candidate)[0]), max(loads), math.fsum(load * load for load in loads)

    best, now = rate(counts), list(counts)
    for _ in range(4 * balance.num_layers):
        moves = []
        for stage in range(balance.num_stages - 1):
            for step in (-1, 1):
                moved = list(now)
                moved[stage] += step
                moved[stage + 1] -= step
                cuts = sum(moved[: stage + 1]) - 1
                if min(moved) >= 1 and cuts not in forbidden:
                    moves.append((rate(moved), moved))
        if not moves or min(moves)[0] >= best:
            break
        best, now = min(moves)
    return tuple(now)


def _nothing_fits(balance: Balance) -> ConfigurationError:
    """The error if no partition fits; how much is too much is that of the partition whose fullest rank is the emptiest."""
    if balance.limits is None or balance.layer_bytes is None or (not _all_alike(balance) and _start(balance) is None):
        return ConfigurationError(
            f"no partition of {balance.num_layers} layers into {balance.num_stages} stages avoids the split points after the "
            f"layers {list(balance.forbidden_cuts)}; use fewer stages"
        )
    room = [max(limit, 1.0) for limit in balance.limits]
    fullness = []
    for rank, stages in enumerate(map(balance.stages_of, range(balance.num_ranks))):
        rows = [balance.layer_bytes[stage] for stage in stages]
        fullness.append(tuple(max(each) / room[rank] for each in zip(*rows, strict=True)))
    by_memory = replace(
        balance,
        seconds=tuple(fullness),
        before_seconds=balance.before_bytes / room[0],
        after_seconds=balance.after_bytes / room[balance.rank_of(balance.num_stages - 1)],
        limits=None,
    )
    excess, rank = _excess(balance, solve(by_memory))
    excess = max(excess, 1.0)
    return NothingFitsError(
        f"no partition of {balance.num_layers} layers into {balance.num_stages} stages fits the memory: the least "
        f"that is too much is {excess / 2**30:.2f} GiB, on pipeline rank {rank} of {balance.num_ranks}, whose limit is "
        f"{balance.limits[rank] / 2**30:.2f} GiB",
        excess_bytes=excess,
        rank=rank,
    )
