"""Which cases of a large product run: enough for every pair of values, or all of them under `make exhaustive`.

    rows = [(family, layout) for family in "abc" for layout in (1, 2)]
    selected(rows)                       # in `make test`: pairwise(rows); with HOLMES_EXHAUSTIVE=1/1: rows; 2/10: each tenth

A fault that needs one value, or two that meet, is found by a pairwise selection; one that needs three may be missed, which
is what `make exhaustive` is for.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Level = tuple[int, Hashable]
"""An axis, by its place in the rows, and a value on it."""
EXHAUSTIVE = os.environ.get("HOLMES_EXHAUSTIVE", "")
"""Which part of the products runs, of how many: "2/10"; "": the pairwise selection."""


def pairs_of(row: tuple[Hashable, ...]) -> list[tuple[Level, Level]]:
    """The pairs of values that meet in a row."""
    return list(combinations(enumerate(row), 2))


def pairwise(
    rows: Sequence[Row],
    *,
    cost: Callable[[Row], float] = lambda row: 1.0,
    needed: Callable[[Level, Level], bool] = lambda one, other: True,
) -> list[Row]:
    """Some of ``rows`` in which every pair of values of two axes meets that meets in any of ``rows``.

    Greedy: the row that covers the most new pairs for its cost is taken next, the first one of equals. ``rows`` is the whole
    product without what is refused; a pair that is not ``needed`` counts for nothing.
    """
    numbers: dict[tuple[Level, Level], int] = {}
    table = np.array([[numbers.setdefault(pair, len(numbers)) for pair in pairs_of(row)] for row in rows])
    missing = np.array([needed(*pair) for pair in numbers])
    costs = np.array([cost(row) for row in rows])
    chosen: list[Row] = []
    while missing.any():
        best = int(np.argmax(missing[table].sum(axis=1) / costs))
        chosen.append(rows[best])
        missing[table[best]] = False
    return chosen


def selected(
    rows: Sequence[Row],
    *,
    cost: Callable[[Row], float] = lambda row: 1.0,
    needed: Callable[[Level, Level], bool] = lambda one, other: True,
) -> list[Row]:
    """What is to run: the pairwise selection, or under `make exhaustive` all ``rows``, or the part of them that is asked for."""
    if not EXHAUSTIVE:
        return pairwise(rows, cost=cost, needed=needed)
    part, parts = map(int, EXHAUSTIVE.split("/"))
    return list(rows[part - 1 :: parts])
