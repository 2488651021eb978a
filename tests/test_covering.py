"""The pairwise selection covers every pair, is deterministic, and is small."""

from itertools import product

import pytest
from covering import each_value, pairwise


def meets(rows: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    """Return, by plain loops, all pairs of values in a row as (axis, value, other axis, other value)."""
    found = set()
    for row in rows:
        for one in range(len(row)):
            for other in range(one + 1, len(row)):
                found.add((one, row[one], other, row[other]))
    return found


@pytest.mark.parametrize(("sizes", "at_most"), [((5, 1), 5), ((3, 3, 3, 3), 12), ((21, 5, 8, 4, 2), 175)])
def test_every_pair_meets_in_few_rows(sizes: tuple[int, ...], at_most: int) -> None:
    rows = list(product(*(range(size) for size in sizes)))
    chosen = pairwise(rows)
    assert meets(chosen) == meets(rows)
    assert len(set(chosen)) == len(chosen) <= at_most
    assert chosen == pairwise(rows)


def test_pairs_that_are_refused_or_not_needed_are_left_out() -> None:
    rows = [row for row in product("abc", "xyz", (1, 2)) if row[:2] != ("a", "x")]
    chosen = pairwise(rows)
    assert set(chosen) <= set(rows) and meets(chosen) == meets(rows)
    less = pairwise(rows, needed=lambda one, other: "z" not in (one[1], other[1]))
    assert meets(less) >= {pair for pair in meets(rows) if "z" not in pair} and len(less) < len(chosen)


def test_dear_rows_are_taken_only_for_what_they_alone_have() -> None:
    rows = list(product("abcd", "xyz", ("cheap", "dear")))
    chosen = pairwise(rows, cost=lambda row: 10.0 if row[2] == "dear" else 1.0)
    assert meets(chosen) == meets(rows)
    assert sum(row[2] == "dear" for row in chosen) == 4  # each of abcd must be the expensive one once


def test_each_value_is_in_a_row() -> None:
    rows = [row for row in product("abcd", "xyz", (1, 2)) if row[:2] != ("a", "x")]
    chosen = each_value(rows)
    assert len(chosen) == 4 and [set(column) for column in zip(*chosen, strict=True)] == [
        set(column) for column in zip(*rows, strict=True)
    ]
