"""Select which cases of a large product run: enough to cover every pair of values, or all by `make exhaustive`.

    rows = [(family, layout) for family in "abc" for layout in (1, 2)]
    selected(rows)                       # in `make test`: pairwise(rows); with HOLMES_EXHAUSTIVE=1/1: rows; 2/10: each tenth

A pairwise selection finds a fault that needs one value or a combination of two; it may miss a fault that needs three, for
which `make exhaustive` exists.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Level = tuple[int, Hashable]
"""The index of an axis in the rows, and a value on that axis."""
EXHAUSTIVE = os.environ.get("HOLMES_EXHAUSTIVE", "")
"""Which part of the products runs, out of how many parts: "2/10"; "" means the pairwise selection."""


def pairs_of(row: tuple[Hashable, ...]) -> list[tuple[Level, Level]]:
    """Return all pairs of values in a row."""
    return list(combinations(enumerate(row), 2))


def pairwise(
    rows: Sequence[Row],
    *,
    cost: Callable[[Row], float] = lambda row: 1.0,
    needed: Callable[[Level, Level], bool] = lambda one, other: True,
) -> list[Row]:
    """Return a subset of ``rows`` that contains every pair of values of two axes that occurs in any of ``rows``.

    Greedy: the next row is the one that covers the most new pairs per cost; of equal rows, the first one. ``rows`` is
    the whole product without the refused cases; pairs that are not ``needed`` do not count.
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


def selected(rows: Sequence[Row], **options: Any) -> list[Row]:
    """Return the rows to run: the selection of :func:`pairwise`, with its options, or under `make exhaustive` all ``rows`` or the requested part
    of them."""
    if not EXHAUSTIVE:
        return pairwise(rows, **options)
    part, parts = map(int, EXHAUSTIVE.split("/"))
    return list(rows[part - 1 :: parts])


def each_value(rows: Sequence[Row]) -> list[Row]:
    """Return a subset of ``rows`` that contains every value of every axis that occurs in any of them; greedy, like :func:`pairwise`."""
    missing = {level for row in rows for level in enumerate(row)}
    chosen: list[Row] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & set(enumerate(row)))))
        missing -= set(enumerate(chosen[-1]))
    return chosen
