"""Random numbers that do not depend on the layout of a run.

Each microbatch, and each layer within it, draws from generators seeded by (seed, step, index of the microbatch among
those of all replicas, place), so the same dropout masks appear whichever rank of whichever replica runs a layer.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of ``random``."""
_NUMPY: Any = np.random.normal.__self__  # type: ignore[attr-defined]
"""That behind the functions of ``numpy.random``."""
_seed_python = super(random.Random, _PYTHON).seed  # the C function, since steps seed at every layer


def is_default(generator: Any) -> bool:
    """Whether a generator is one of those that are seeded here."""
    defaults = (_PYTHON, _NUMPY, torch.default_generator, *torch.cuda.default_generators)
    return any(generator is each for each in defaults)


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from whole numbers, by SplitMix64's finaliser over each in turn."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the host and of ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    _seed_python(seed)
    _PYTHON.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed, device)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, of the host and of ``device``, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states of all generators from what :func:`random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the state of every generator on exit, so that what a step draws does not disturb the data loaders."""
    python, numpy_state, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(host)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
