"""Partitions: uniform, given by hand, and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition


@given(st.integers(1, 12), st.integers(0, 40))
def test_uniform_is_even_and_spares_the_last_stage(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    partition = make_uniform_partition(num_layers, num_stages)
    counts = partition.layer_counts
    assert sum(counts) == partition.num_layers == num_layers
    assert len(counts) == partition.num_stages == num_stages
    assert make_partition("uniform", num_layers, num_stages) == partition
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
    if num_stages > 2 and counts[0] > min(counts):
        assert min(counts[1:-1]) == max(counts)
    held = [layer for stage in range(num_stages) for layer in partition.layers_of(stage)]
    assert held == list(range(num_layers))
    for stage in range(num_stages):
        assert all(partition.stage_of(layer) == stage for layer in partition.layers_of(stage))


def test_by_hand() -> None:
    partition = make_partition([3, 1], 4, 2)
    assert partition == Partition((3, 1))
    assert (partition.layers_of(0), partition.layers_of(1)) == (range(3), range(3, 4))


@pytest.mark.parametrize(
    ("spec", "num_layers", "num_stages", "words"),
    [
        ([2, 3], 6, 2, ["[2, 3]", "adds up to 5", "has 6", "[3, 3]"]),
        ([2, 2, 2], 6, 2, ["3 counts", "2 stages"]),
        ([0, 0], 0, 2, ["[0, 0]", "stage 0 has 0"]),
        ([7, -1], 6, 2, ["stage 1 has -1"]),
        ([3.0, 3], 6, 2, ["stage 0 has 3.0"]),
        ([True, 5], 6, 2, ["stage 0 has True"]),
        ("unifrom", 6, 2, ["'unifrom'", "uniform", "list of 2"]),
        ("uniform", 3, 4, ["3 layers", "4 stages", "at most 3"]),
        ([1, 1, 2, 1], 3, 4, ["3 layers", "4 stages"]),
    ],
)
def test_refused(spec: object, num_layers: int, num_stages: int, words: list[str]) -> None:
    with refusal(*words):
        make_partition(spec, num_layers, num_stages)  # type: ignore[arg-type]
