"""The pairwise selection covers every pair, is deterministic, and is small."""

from itertools import product

import pytest
from covering import pairwise


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
