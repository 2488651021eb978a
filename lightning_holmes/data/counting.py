"""CountingLoader: a data loader that says how many samples the run has seen, and starts there again.

Its state counts the samples of all replicas together, within the epoch. So a run that stopped in mid-epoch goes on at
the next sample with any number of replicas: the order of samples depends on the seed and the epoch alone, and a batch
of all replicas together is a contiguous piece of it.

    sampler = CountingSampler(len(dataset), batch_size=8, num_replicas=2, rank=0, seed=0)
    loader = CountingLoader(dataset, sampler=sampler, batch_size=8, drop_last=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

SAMPLES_SEEN = "samples_seen"


class CountingSampler(DistributedSampler[Any]):
    """This replica's samples in the order of one shuffle an epoch; whole batches of all replicas only.

    Lightning leaves samplers of this base class as they are and calls :meth:`set_epoch`.

    Args:
        length: samples of the data set.
        batch_size: samples of one replica's batch.
    """

    def __init__(self, length: int, *, batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(range(length), num_replicas=num_replicas, rank=rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        whole = batch_size * num_replicas
        self.total_size = length // whole * whole
        self.num_samples = self.total_size // num_replicas
        self.start = 0
        """Samples of all replicas to leave out, in the next pass only."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)[: self.total_size]  # type: ignore[arg-type]
        start, self.start = self.start, 0
        return iter(order[start + self.rank :: self.num_replicas].tolist())


class CountingLoader(DataLoader[Any]):
    """A loader over a :class:`CountingSampler` with the state that Lightning saves and restores."""

    def __init__(self, dataset: Dataset[Any], *, sampler: Sampler[Any], **options: Any) -> None:
        super().__init__(dataset, sampler=sampler, **options)
        self._seen = 0
        self._resume_at = 0

    def __iter__(self) -> Any:
        self._seen, self._resume_at = self._resume_at, 0
        if isinstance(self.sampler, CountingSampler):  # Trainer(overfit_batches=...) puts another in its place
            if self._seen >= self.sampler.total_size:
                self._seen = 0
            self.sampler.start = self._seen
        return self._count(super().__iter__())

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self.batch_size is not None
        for batch in batches:
            self._seen += self.batch_size * getattr(self.sampler, "num_replicas", 1)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How many samples of the epoch all replicas together have been given."""
        return {SAMPLES_SEEN: self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next pass behind the samples that the saved run has seen; none, if it had seen all."""
        self._resume_at = int(state[SAMPLES_SEEN])
