"""ResumableSampler: continues the order of a replica's samples in mid-epoch, also if the order is random.

torchdata's StatefulDataLoader saves its position, and the state of a sampler that has one. With several replicas Lightning wraps the sampler in a
DistributedSampler, which has no state: a resumed loader would draw another order, and skip to its position in that.

    with Replacements() as run:
        make_resumable(loader, run)        # loader.state_dict() now holds the random state from which its order was drawn
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_holmes.lightning_private import wrapped_sampler
from lightning_holmes.pipeline.seeds import preserved_random_state, random_states, set_random_states
from lightning_holmes.replacements import Replacements

_HOST = torch.device("cpu")


def make_resumable(loader: DataLoader[Any], changes: Replacements) -> None:
    """Let a stateful loader with a DistributedSampler save and restore the order of its samples."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or hasattr(sampler, "load_state_dict"):
        return
    if hasattr(loader, "load_state_dict"):
        changes.replace(loader.batch_sampler, sampler=ResumableSampler(sampler))


class ResumableSampler(Sampler[int]):
    """``sampler`` with a state: the random state from which the order of the present pass was drawn, and the number of samples given so far.

    Lightning's wrapper draws all its random numbers when the pass begins, from the generator of the sampler that it wraps, or from the
    process's generators.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler = sampler
        self._generator: Any = getattr(wrapped_sampler(sampler), "generator", None)
        self._origin: dict[str, Any] = {}
        self._given = 0
        self._resumed: dict[str, Any] | None = None

    @property
    def wrapped(self) -> DistributedSampler[Any]:
        """The sampler that is given a state."""
        return self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._origin, self._given = self._take_origin(), 0
            return self._counted(iter(self._sampler))
        self._origin, self._given = resumed["origin"], resumed["given"]
        with preserved_random_state(_HOST):
            self._put_origin(self._origin)
            order = iter(self._sampler)
        return self._counted(itertools.islice(order, self._given, None))

    def _counted(self, order: Iterator[int]) -> Iterator[int]:
        for index in order:
            self._given += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"origin": self._origin, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state

    def _take_origin(self) -> dict[str, Any]:
        origin = {"seed": self._sampler.seed, "epoch": self._sampler.epoch, **random_states(_HOST)}
        if isinstance(self._generator, torch.Generator):
            origin["generator"] = self._generator.get_state()
        return origin

    def _put_origin(self, origin: dict[str, Any]) -> None:
        self._sampler.seed = origin["seed"]
        self.set_epoch(origin["epoch"])
        set_random_states(origin, _HOST)
        if "generator" in origin:
            self._generator.set_state(origin["generator"])
