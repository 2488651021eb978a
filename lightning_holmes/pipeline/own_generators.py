"""Generators that a module keeps for itself: ``self.rng = numpy.random.default_rng()``, ``self.batches = iter(loader)``.

The default generators are seeded for each microbatch and layer (seeds.py). One of the module's own is not: its draws go on from
batch to batch, as in plain Lightning. The code before the layers runs once for each stage. So with one microbatch every stage
begins with the states of the pipeline's first rank, and after the step every rank has those of the last stage, whose step has run
to its end. This gives the draws of plain Lightning as long as the step draws before the first layer or after the last one.
Draws in or between the layers, and in several microbatches, are refused. So it is with iterators, which an :class:`Unwound` replaces.

    draws = OwnDraws("Net.training_step", generators, states_of(generators))
    with draws.around(is_backward=False): step(part)                # on each stage
    set_states(generators, received)                                # draws.end of the last stage
"""

import copy
import io
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_holmes.comm.wire import decode, encode
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.object_state import find_below, is_of_library, is_one_of
from lightning_holmes.pipeline.seeds import is_default

_RANDOM = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_KINDS = (*_RANDOM, Iterator)
States = dict[str, bytes]
"""The state of each generator by its path."""


class Unwound(Iterator[Any]):
    """An iterator of the user's whose draws are counted and can be taken back, since trials of a step draw, too; a copy draws the same.

    Attributes:
        generation: how many iterators had its place before it.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self.generation, self._place, self._items = 0, 0, items
        (self._ahead,) = itertools.tee(items, 1)
        self.keep()

    def keep(self) -> None:
        """Note the place up to which draws can be taken back from now on; what was drawn before is let go."""
        self._kept = self._place, copy.copy(self._ahead)

    def __next__(self) -> Any:
        item = next(self._ahead)
        self._place += 1
        return item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unwound":
        copied = memo[id(self)] = object.__new__(Unwound)
        vars(copied).update(vars(self), _ahead=copy.copy(self._ahead))
        return copied

    def getstate(self) -> tuple[int, int]:
        """Which of the iterators at its place it is, and how many items were drawn."""
        return self.generation, self._place

    def setstate(self, state: tuple[int, int]) -> None:
        """Draw on, or take draws back."""
        generation, place = state
        if generation != self.generation:
            raise UnsupportedModuleError(
                "a step has made an iterator of its module anew in or after the layers, where other stages do not see it: make it before the "
                "layers, or in a hook such as on_train_epoch_start"
            )
        if place < self._place:
            self._place, self._ahead = self._kept[0], copy.copy(self._kept[1])
        while self._place < place:
            next(self)


def find_generators(module: nn.Module) -> dict[str, Any]:
    """The generators below ``module`` by their path, those in containers and objects that it holds, too, those of its classes,
    and the global ones of the files in which these are defined. An iterator is replaced by an :class:`Unwound`, wherever it is."""
    unwound: dict[int, Unwound] = {}

    def replaced(value: Any) -> Any:
        is_its_own = isinstance(value, (*_RANDOM, Unwound, io.IOBase, pl.utilities.CombinedLoader))
        return value if is_its_own else unwound.setdefault(id(value), Unwound(value))

    found = find_below(module, _KINDS, replaced)
    kinds = {kind for part in module.modules() for kind in type(part).__mro__ if not is_of_library(kind)}
    spaces: dict[str, Any] = {kind.__module__: sys.modules.get(kind.__module__, object) for kind in kinds}
    spaces |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    for place, space in sorted(spaces.items()):
        for key, value in list(vars(space).items()):
            if is_one_of(value, _KINDS):
                found.setdefault(f"{place}.{key}", new := replaced(value))
                if new is not value:
                    setattr(space, key, new)
    return {path: g for path, g in found.items() if isinstance(g, (*_RANDOM, Unwound)) and not is_default(g)}


def states_of(generators: Mapping[str, Any]) -> States:
    """The state of each generator."""
    return {name: _state(name, generator) for name, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: States) -> None:
    """Give each generator its state of ``states``."""
    for name, generator in generators.items():
        if name in states and _state(name, generator) != states[name]:
            _set_state(generator, states[name])


@contextmanager
def preserved_generators(module: nn.Module) -> Iterator[None]:
    """Give the generators of ``module`` their states again on exit."""
    generators = find_generators(module)
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, states)


class OwnGenerators:
    """The generators of a module, by path. Hooks may make others at any time: all are looked for at the first batch of each step and
    epoch, and at each batch if there are any; attributes of the module itself at each batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.by_path = find_generators(module)
        self._when: object = None
        self._looks = True

    def look(self, when: object) -> None:
        """Look for generators before a batch; ``when``: its step and epoch."""
        self._looks, self._when = when != self._when, when
        if self.by_path or self._may_have_more():
            before, self.by_path = self.by_path, find_generators(self._module)
            for path, iterator in self._unwound():
                if (former := before.get(path)) is not iterator and isinstance(former, Unwound):
                    iterator.generation = former.generation + 1
                iterator.keep()

    def _unwound(self) -> list[tuple[str, Unwound]]:
        return [(path, each) for path, each in self.by_path.items() if isinstance(each, Unwound)]

    def refuse_new(self, place: str, *, repeats: bool) -> None:
        """Called after a batch of several stages or microbatches; ``repeats``: this rank has started the step several times.

        Raises:
            UnsupportedModuleError: the step has made a generator.
        """
        known, made = self.by_path, set()
        if self._may_have_more() or (repeats and self._unwound()):
            found = find_generators(self._module)
            made = {path for path, each in found.items() if path not in known or (repeats and known[path] is not each)}
        if made:
            raise UnsupportedModuleError(
                f"{place} makes {min(made)}, a generator of its own, of which each stage and each microbatch would have another: make it "
                f"in __init__ or in a hook, such as on_train_start"
            )

    def _may_have_more(self) -> bool:
        own = vars(self._module).items()
        return self._looks or any(isinstance(v, _KINDS) and f"self.{k}" not in self.by_path for k, v in own)


class OwnDraws:
    """What the steps of one batch draw from a module's own generators, on one rank.

    Args:
        place: the step, for messages.
        start: the states with which each stage begins.
        splits: the batch has several microbatches.

    Attributes:
        before_layers, end: the states when the latest forward came to the first layer, and when it ended.
    """

    def __init__(self, place: str, generators: Mapping[str, Any], start: States, *, splits: bool = False) -> None:
        self._place, self._generators, self._splits = place, generators, splits
        self.start = self.before_layers = self.end = start

    @contextmanager
    def around(self, *, is_backward: bool) -> Iterator[None]:
        """Context for a stage's forward or backward.

        Raises:
            UnsupportedModuleError: the forward of one of several microbatches, or the backward (code that activation checkpointing
                runs again), has drawn.
        """
        if is_backward:
            before, where = states_of(self._generators), " in its backward"
        else:
            set_states(self._generators, self.start)
            before, where = self.start, " in each of several microbatches"
        yield
        if is_backward or self._splits:
            self._refuse_since(before, where)
        if not is_backward:
            self.end = states_of(self._generators)

    def arrive(self, *, is_first: bool) -> None:
        """Called where a step arrives at a layer, and where it leaves one that this rank has run.

        Raises:
            UnsupportedModuleError: the step has drawn in the layers or between them.
        """
        if is_first:
            self.before_layers = states_of(self._generators)
        else:
            self._refuse_since(self.before_layers, " in its layers or between them")

    def drawn(self) -> tuple[str, ...]:
        """The generators from which the step has drawn."""
        return tuple(n for n, generator in self._generators.items() if _state(n, generator) != self.start[n])

    def compare(self, others: States) -> None:
        """Check that another stage has drawn the same before the layers.

        Raises:
            UnsupportedModuleError: it has not.
        """
        for name, state in self.before_layers.items():
            if others.get(name, state) != state:
                where = " before its layers, and other numbers on each stage"
                raise UnsupportedModuleError(describe_draw(self._place, name, where))

    def _refuse_since(self, states: States, where: str) -> None:
        for name, generator in self._generators.items():
            if _state(name, generator) != states[name]:
                raise UnsupportedModuleError(describe_draw(self._place, name, where))


def describe_draw(place: str, what: str, where: str = "") -> str:
    """The message on why a step may not draw from a generator of its own, and what to do instead."""
    return (
        f"{place} draws from {what}, a generator of its own{where}, which the stages of a pipeline and microbatches would advance "
        f"differently: draw before the first layer or after the last one, with num_microbatches=1 (eval_num_microbatches=1), or from the "
        f"default generators (torch's, numpy.random's and random's own functions), which are seeded for each microbatch; or use "
        f"pipeline_parallel_size=1 and num_microbatches=1 with the default sharding"
    )


def _state(name: str, generator: Any) -> bytes:
    if isinstance(generator, random.SystemRandom):
        raise UnsupportedModuleError(
            f"{name} is a random.SystemRandom, which has no state that all stages of a pipeline could share: use random.Random()"
        )
    if isinstance(generator, np.random.Generator):
        return encode(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return encode(generator.get_state(legacy=False))
    return encode(generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate())


def _set_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = decode(state)
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(decode(state))
    else:
        generator.setstate(decode(state))
