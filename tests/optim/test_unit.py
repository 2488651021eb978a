"""Units: each element of each parameter is on exactly one rank, split evenly by elements or by whole parameters."""

import random
from collections.abc import Iterable

import pytest
import torch

from lightning_holmes.optim import unit as units
from lightning_holmes.optim.unit import Unit, adopt, cut_by_elements, cut_by_parameters, deal_parameters, side_by_side


def unit_of(names: Iterable[str], sizes: Iterable[int], multiple_of: int) -> Unit:
    parameters = {name: torch.empty(size, device="meta") for name, size in zip(names, sizes, strict=True)}
    return side_by_side(parameters, multiple_of=multiple_of)


def units_of(seed: int, num_ranks: int) -> list[Unit]:
    """Return padded units of random parameters, some without elements."""
    generator = random.Random(seed)
    found = []
    for bucket in range(generator.randint(1, 4)):
        sizes = tuple(generator.choice((0, 1, 3, 17, 100)) for _ in range(generator.randint(1, 6)))
        found.append(unit_of([f"{bucket}.{i}" for i in range(len(sizes))], sizes, num_ranks))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cut", [cut_by_elements, cut_by_parameters])
def test_every_element_is_on_one_rank(cut, seed: int, num_ranks: int) -> None:  # type: ignore[no-untyped-def]
    units = units_of(seed, num_ranks)
    pieces = cut(units, num_ranks)
    for index, unit in enumerate(units):
        begin = 0
        for name, size in zip(unit.names, unit.sizes, strict=True):
            own = [p for p in pieces if p.name == name]
            assert [e for p in own for e in range(p.start, p.stop)] == list(range(size))
            assert own and all(p.unit == index and p.offset == begin + p.start for p in own)
            if cut is cut_by_elements:
                share = unit.numel // num_ranks
                assert all(
                    p.rank * share <= p.offset and p.offset + p.numel <= (p.rank + 1) * share for p in own if size
                )
            else:
                assert len(own) == 1
            begin += size


def test_whole_parameters_are_dealt_in_runs_of_about_the_same_size() -> None:
    sizes = (300, 10, 10, 200, 200, 90, 150, 40)
    pieces = cut_by_parameters([unit_of("abcdefgh", sizes, 4)], 4)
    assert [p.rank for p in pieces] == sorted(p.rank for p in pieces)
    held = [sum(p.numel for p in pieces if p.rank == rank) for rank in range(4)]
    assert max(held) <= 250 + max(sizes) / 2


def test_whole_parameters_in_parts_of_one_size_by_hand() -> None:
    unit = unit_of(("qkv", "proj", "up", "down", "norm"), (30, 10, 40, 40, 2), 2)
    pieces = deal_parameters(unit, 2, index=3)
    assert unit.numel == 2 * 70, "each part has room for the larger one"
    assert dict(zip(unit.names, unit.starts, strict=True)) == {p.name: p.offset for p in pieces}
    places = {p.name: (p.rank, p.offset) for p in pieces}
    assert places == {"up": (0, 0), "qkv": (0, 40), "down": (1, 70), "proj": (1, 110), "norm": (1, 120)}
    assert all(p.unit == 3 and p.start == 0 for p in pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 100])
def test_a_gradient_is_rounded_in_its_own_memory(
    dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_CHUNK", 8)
    unit = unit_of("a", [numel], 1)
    unit.dtype, unit.gradient = dtype, torch.randn(numel)
    expected, memory = unit.gradient.to(dtype), unit.gradient.untyped_storage().data_ptr()
    for _ in range(2):
        unit.round_gradient()
        assert unit.gradient.dtype == dtype and torch.equal(unit.gradient, expected)
        assert unit.gradient.untyped_storage().data_ptr() == memory


def test_masters_take_over_what_was_written_and_keep_their_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_CHUNK", 8)
    master = torch.randn(100)
    now, expected = master.bfloat16(), master.clone()
    now[::7] = torch.arange(15).bfloat16() + 100
    expected[::7] = torch.arange(15).float() + 100
    adopt(master, now)
    assert torch.equal(master, expected)
