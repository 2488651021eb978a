"""Seeds that depend on every part of a place in the run, and random generators left as they were found."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_holmes.pipeline.seeds import derive_seed, preserved_random_state, seed_all

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_seeds_are_63_bit_and_depend_on_every_part(parts: list[int]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**63 and seed == derive_seed(*parts)
    for index in range(len(parts)):
        changed = [*parts]
        changed[index] += 1
        assert derive_seed(*changed) != seed


def test_neighbouring_places_do_not_repeat() -> None:
    seeds = {derive_seed(1, s, r, m, p) for s in range(10) for r in range(4) for m in range(8) for p in range(20)}
    assert len(seeds) == 10 * 4 * 8 * 20


def test_generators_are_left_as_found() -> None:
    torch.manual_seed(3)
    expected = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    with preserved_random_state(CPU):
        seed_all(5, CPU)
        first = (random.random(), float(np.random.rand()), float(torch.rand(())))
    with preserved_random_state(CPU):
        seed_all(5, CPU)
        assert first == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert expected == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
