"""Generators that a module keeps for itself: found, their states sent and set, and draws that stages would not share refused.

Baseline: the same generator, drawn from in one go.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_holmes.comm.wire import decode, encode
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.own_generators import (
    OwnDraws,
    find_generators,
    preserved_generators,
    set_states,
    states_of,
)

of_this_file = np.random.default_rng(3)
MADE: dict[str, Callable[[], Any]] = {
    **{
        kind.__name__: lambda kind=kind: np.random.Generator(kind(3))
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
    "RandomState": lambda: np.random.RandomState(3),
    "Random": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal())


@pytest.mark.parametrize("name", MADE)
def test_a_state_goes_over_the_wire_and_back(name: str) -> None:
    generators = {"rng": MADE[name]()}
    draw(generators["rng"])
    states = states_of(generators)
    drawn = [draw(generators["rng"]) for _ in range(5)]
    assert states_of(generators) != states
    sent = decode(encode(states))
    assert sent == states
    set_states(generators, sent)
    assert [draw(generators["rng"]) for _ in range(5)] == drawn


def test_generators_of_a_module_and_of_its_file_are_found_and_put_back() -> None:
    class Holding(nn.Module):
        of_class = random.Random(2)

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)
            self.inner.noise = {"of": [random.Random(1)]}
            self.default = np.random.normal.__self__  # seeded for each microbatch, not one of its own

    module = Holding()
    found = find_generators(module)
    of_class = f"{__name__}.{Holding.__qualname__}.of_class"
    assert found.keys() == {"self.inner.noise.of.0", f"{__name__}.of_this_file", of_class}
    before = states_of(found)
    with preserved_generators(module):
        assert [draw(generator) for generator in found.values()]
    assert states_of(found) == before


def test_a_generator_without_a_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"self.rng is a random.SystemRandom"):
        states_of({"self.rng": random.SystemRandom()})


def test_draws_that_stages_would_not_share_are_refused() -> None:
    generators = {"self.rng": random.Random(1)}
    start = states_of(generators)
    draws = OwnDraws("Net.training_step", generators, start)
    with draws.around(is_backward=False):
        draw(generators["self.rng"])
        draws.arrive(is_first=True)
        draws.arrive(is_first=False)
        draw(generators["self.rng"])
    assert states_of(generators) == draws.end != start and draws.drawn() == ("self.rng",)
    with draws.around(is_backward=False):
        assert states_of(generators) == start, "each stage begins anew"
        draws.arrive(is_first=True)
        draw(generators["self.rng"])
        with pytest.raises(UnsupportedModuleError, match="in its layers or between them"):
            draws.arrive(is_first=False)
    with pytest.raises(UnsupportedModuleError, match="in its backward"), draws.around(is_backward=True):
        draw(generators["self.rng"])
    with pytest.raises(UnsupportedModuleError, match="before its layers, and other numbers on each stage"):
        draws.compare({"self.rng": "another"})
    split = OwnDraws("Net.training_step", generators, start, splits=True)
    with (
        pytest.raises(UnsupportedModuleError, match="in each of several microbatches"),
        split.around(is_backward=False),
    ):
        draw(generators["self.rng"])
