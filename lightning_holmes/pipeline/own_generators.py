"""Random generators that a module keeps for itself: ``self.rng = numpy.random.default_rng()``, ``random.Random()``.

The default generators are seeded for each microbatch and layer (seeds.py). One of the module's own is not: the code before the
layers runs once for each stage and microbatch, so that the input's draws would not be the loss's. Steps of several stages or
microbatches that draw from one are refused, when they are traced and, where that batch did not reach the draw, later.

    generators = find_generators(module)
    before = states_of(generators); step(); refuse_draws("training_step", generators, before)
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_holmes.comm.wire import attributes_of
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import FABRIC, TRAINER
from lightning_holmes.pipeline.object_state import CONTAINERS, is_looked_into
from lightning_holmes.torch_private import MODULE_REGISTRIES

_MOST_ENTRIES = 1000
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def find_generators(module: nn.Module) -> dict[str, Any]:
    """The generators below ``module`` by their path, those in containers and objects that it holds, too."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def look(value: Any, path: str) -> None:
        if isinstance(value, _KINDS):
            found.setdefault(path, value)
        elif id(value) not in seen and (type(value) in CONTAINERS or is_looked_into(value)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner: Any = value.items()
            elif type(value) in CONTAINERS:
                inner = enumerate(value) if len(value) <= _MOST_ENTRIES else ()
            else:
                inner = attributes_of(value).items()
            for key, each in list(inner):
                look(each, f"{path}.{key}")

    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in (*MODULE_REGISTRIES, TRAINER, FABRIC):
                look(value, f"{name}.{key}" if name else key)
    return found


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """A comparable state of each generator."""
    return {name: _state(generator) for name, generator in generators.items()}


def refuse_draws(place: str, generators: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Refuse a step at ``place`` that has drawn from one of ``generators`` since their states were ``before``.

    Raises:
        UnsupportedModuleError: names the generator and what to do instead.
    """
    for name, generator in generators.items():
        if _state(generator) != before[name]:
            raise UnsupportedModuleError(describe_draw(place, f"self.{name}", type(generator)))


def describe_draw(place: str, what: str, kind: type) -> str:
    """The message on why a step may not draw from a generator of its own, and what to do instead."""
    default = (
        "torch"
        if issubclass(kind, torch.Generator)
        else "random"
        if issubclass(kind, random.Random)
        else "numpy.random"
    )
    return (
        f"{place} draws from {what}, a generator of its own, which the stages of a pipeline, its chunks and microbatches would advance "
        f"differently: draw from the default generator ({default}'s own functions), which is seeded for each microbatch, or use "
        f"pipeline_parallel_size=1 and num_microbatches=1 with the default sharding"
    )


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        kind, keys, *rest = generator.get_state()
        return kind, np.asarray(keys).tobytes(), *rest
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate()
