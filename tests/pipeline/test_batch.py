"""Splitting batches into microbatches: every sample once, in order, whatever the container; or an error with the reason."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from torch import Tensor

from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.pipeline import checksum
from lightning_holmes.pipeline.batch import BatchSplitter, merge_outputs, microbatch_bounds, signature, weighted_mean
from lightning_holmes.pipeline.checksum import Checksum

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Graph:
    nodes: Tensor
    name: str


@given(size=st.integers(1, 50), parts=st.integers(1, 50))
def test_bounds_cover_every_sample_once_and_differ_by_at_most_one(size: int, parts: int) -> None:
    if parts > size:
        return
    bounds = microbatch_bounds(size, parts)
    assert [i for a, b in bounds for i in range(a, b)] == list(range(size))
    lengths = [b - a for a, b in bounds]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


CONTAINERS: list[tuple[str, Any, Any]] = [
    ("tensor", torch.arange(7), lambda m: m),
    ("dict", {"a": torch.arange(7), "scale": torch.tensor(2.0), "n": 3}, lambda m: m["a"]),
    ("list", [torch.arange(7), torch.ones(7, 3)], lambda m: m[0]),
    ("named tuple", Pair(torch.arange(7), torch.ones(7)), lambda m: m.x),
    ("user dict", UserDict(a=torch.arange(7)), lambda m: m["a"]),
    ("dataclass", Graph(torch.arange(7), "g"), lambda m: m.nodes),
    (
        "nested",
        {"in": (torch.arange(7), {"mask": torch.ones(7, 2)}), "id": [str(i) for i in range(7)]},
        lambda m: m["in"][0],
    ),
    ("one list entry a sample", (torch.arange(7), [torch.ones(i + 1) for i in range(7)]), lambda m: m[0]),
]


@pytest.mark.parametrize(("name", "batch", "first"), CONTAINERS, ids=[c[0] for c in CONTAINERS])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_every_container_is_dealt_in_order_and_keeps_its_type(name: str, batch: Any, first: Any, parts: int) -> None:
    microbatches = BatchSplitter().split(batch, parts)
    assert len(microbatches) == parts
    assert torch.cat([first(m) for m in microbatches]).tolist() == list(range(7))
    assert all(type(m) is type(batch) for m in microbatches)


def test_lists_of_strings_and_of_unlike_tensors_are_dealt_with_their_samples() -> None:
    batch = {"x": torch.arange(5), "name": list("abcde"), "boxes": [torch.ones(i, 4) for i in (3, 1, 2, 2, 5)]}
    first, second = BatchSplitter().split(batch, 2)
    assert first["name"] == ["a", "b", "c"] and second["name"] == ["d", "e"]
    assert [len(b) for b in second["boxes"]] == [2, 5]


def test_a_list_that_can_be_read_two_ways_is_refused_until_a_batch_has_shown_which_is_meant() -> None:
    splitter = BatchSplitter()
    ambiguous = (torch.zeros(2, 3), [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(UnsupportedModuleError, match="split_batch"):
        splitter.split(ambiguous, 2)
    splitter.split((torch.zeros(4, 3), [torch.zeros(4), torch.zeros(4)]), 2)
    _, second = splitter.split(ambiguous, 2)
    assert [len(t) for t in second[1]] == [1, 1]


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": torch.zeros(4, 2), "edge_index": torch.zeros(2, 9)}, ["edge_index", "4", "2", "split_batch"]),
        ({"n": 3}, ["no tensor", "split_batch"]),
        ({"x": torch.zeros(4), "graph": object()}, ["graph", "object", "split_batch"]),
    ],
)
def test_what_cannot_be_dealt_is_refused_by_name(batch: Any, names: list[str]) -> None:
    with refusal(*names, error=UnsupportedModuleError):
        BatchSplitter().split(batch, 2)
    assert BatchSplitter().split(batch, 1) == [batch]


def test_fewer_samples_than_microbatches_names_both() -> None:
    with pytest.raises(ConfigurationError, match=r"3 samples.*num_microbatches=4"):
        BatchSplitter().split(torch.zeros(3), 4)


def test_checksums_tell_values_order_and_shapes_apart() -> None:
    batches = [
        {"x": torch.arange(6)},
        {"x": torch.arange(6).flip(0)},
        {"x": torch.arange(6).view(2, 3)},
        {"y": torch.arange(6)},
        {"x": torch.arange(6).float()},
    ]
    assert len({Checksum(b).known for b in batches}) == len(batches)
    assert Checksum(batches[0]).known == Checksum({"x": torch.arange(12)[:6]}).known


def test_values_of_an_accelerator_are_told_apart_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the accelerator here."""
    monkeypatch.setattr(checksum, "is_on_host", lambda tensor: tensor.dtype == torch.int64)
    batch = {"x": torch.arange(6.0), "y": torch.arange(3)}
    same, swapped = Checksum(batch), Checksum({"x": batch["x"].flip(0), "y": batch["y"]})
    assert same.has_values and same.known == swapped.known and same.values() != swapped.values()
    assert same.values() == Checksum({"x": torch.arange(6.0), "y": torch.arange(3)}).values()
    for other in ({"x": batch["x"], "y": batch["y"] + 1}, {"x": batch["x"][:5], "y": batch["y"]}):
        assert Checksum(other).known != same.known


def test_signatures_know_shapes_not_values() -> None:
    assert signature({"x": torch.zeros(2, 3)}) == signature({"x": torch.ones(2, 3)})
    assert signature({"x": torch.zeros(2, 3)}) != signature({"x": torch.zeros(3, 3)})


def test_outputs_are_put_together_by_samples_and_weights() -> None:
    parts = [
        {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 2), "names": ["a", "b", "c"], "kind": "x", "lr": 0.5},
        {"loss": torch.tensor(3.0), "logits": torch.ones(1, 2), "names": ["d"], "kind": "x", "lr": 0.5},
    ]
    merged = merge_outputs(parts, [3, 1], [3.0, 1.0], "the output")
    assert merged["loss"] == 1.5 and merged["logits"].shape == (4, 2)
    assert merged["names"] == list("abcd") and merged["kind"] == "x" and merged["lr"] == 0.5


def test_an_output_that_cannot_be_put_together_is_named() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"the output\['kind'\]"):
        merge_outputs([{"kind": "x"}, {"kind": "y"}], [1, 1], [1.0, 1.0], "the output")


def test_weighted_means_leave_equal_values_unrounded_and_skip_zero_weights() -> None:
    value = torch.tensor(0.1)
    assert weighted_mean([value] * 3, [1.0, 1.0, 5.0]) == value
    assert weighted_mean([torch.tensor(float("nan")), value], [0.0, 2.0]) == value
