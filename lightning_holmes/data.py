"""What a data module of one's own needs: the data-parallel coordinate, and loaders that count samples.

A :class:`CountingLoader`'s state is the epoch and the number of its samples that all replicas together have seen. A run that
stopped in mid-epoch thus resumes at the next sample with any number of replicas: the order of samples depends only on the seed and the
epoch, the batch of all replicas together is a contiguous piece of that order, and each replica's batch is a contiguous piece of
that batch. Microbatches of one size then hold the same samples with any number of replicas, and draw the same dropout.

    class Rows(CountedDataModule):
        def train_dataloader(self):
            return self.make_train_loader(dataset)

Data that shards itself, such as a stream, selects its part by :func:`data_parallel_coordinate` (comm/coordinate.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_holmes.comm.coordinate import data_parallel_coordinate
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl

__all__ = ["CountedDataModule", "CountingLoader", "CountingSampler", "data_parallel_coordinate"]

SAMPLES_SEEN = "samples_seen"


class CountingSampler(DistributedSampler[Any]):
    """This replica's part of each batch of all replicas, in the order of one shuffle per epoch; whole batches only.

    Lightning does not replace samplers of this base class, and calls :meth:`set_epoch`.

    Args:
        length: number of samples of the data set.
        batch_size: number of samples of one replica's batch.
    """

    def __init__(self, length: int, *, batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(range(length), num_replicas=num_replicas, rank=rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        whole = batch_size * num_replicas
        self.batch_size = batch_size
        self.total_size = length // whole * whole
        self.num_samples = self.total_size // num_replicas
        self.seen_of_epoch: tuple[int, int] = (0, 0)
        """An epoch, and the number of its samples to skip."""

    @property
    def start(self) -> int:
        """The position in the current epoch's order at which a pass of all replicas starts."""
        epoch, seen = self.seen_of_epoch
        return seen if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)[: self.total_size]  # type: ignore[arg-type]
        left = order[self.start :]
        whole = self.batch_size * self.num_replicas
        parts = left[: len(left) // whole * whole].view(-1, self.num_replicas, self.batch_size)
        return iter(parts[:, self.rank].flatten().tolist())


class CountingLoader(DataLoader[Any]):
    """A loader over a :class:`CountingSampler`, with a state that Lightning saves and restores."""

    def __init__(self, dataset: Dataset[Any], *, sampler: Sampler[Any], **options: Any) -> None:
        super().__init__(dataset, sampler=sampler, **options)
        self._seen = 0

    def __iter__(self) -> Any:
        self._seen = self.sampler.start if isinstance(self.sampler, CountingSampler) else 0
        return self._count(super().__iter__())

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self.batch_size is not None
        for number, batch in enumerate(batches):
            if number == 0 and isinstance(self.sampler, CountingSampler):
                self._seen = self.sampler.start  # Lightning may set the epoch between __iter__ and the first batch
            self._seen += self.batch_size * getattr(self.sampler, "num_replicas", 1)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its samples that all replicas together have received."""
        return {"epoch": getattr(self.sampler, "epoch", 0), SAMPLES_SEEN: self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start passes of the saved epoch after the samples that the saved run has seen; if it has seen all, start the next epoch."""
        sampler = self.sampler
        if not isinstance(sampler, CountingSampler):  # Trainer(overfit_batches=...) has replaced it
            return
        epoch, seen = int(state["epoch"]), int(state[SAMPLES_SEEN])
        if seen >= sampler.total_size:
            epoch, seen = epoch + 1, 0
        sampler.set_epoch(epoch)  # workers begin to load before Lightning sets the epoch
        sampler.seen_of_epoch = (epoch, seen)


class CountedDataModule(pl.LightningDataModule):
    """A data module whose training loader counts samples, so that a run resumes from a checkpoint in mid-epoch at the next sample.

    Training samples are shuffled by ``seed`` and the epoch, and assigned to the replicas.

    Args:
        batch_size: samples of one replica's batch.
        num_workers: of each loader.
    """

    def __init__(self, *, batch_size: int, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < least:
                raise ConfigurationError(f"{name}={value} is too small: give {least} or more.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._loader: CountingLoader | None = None
        self._resumed: dict[str, Any] | None = None

    def make_train_loader(self, samples: Any, **options: Any) -> CountingLoader:
        """Make the loader of this replica's part of ``samples``; a resumed run starts after the samples it has seen."""
        sharing = {"num_replicas": 1, "rank": 0}
        if self.trainer is not None:
            sharing = self.trainer.distributed_sampler_kwargs or sharing
        sampler = CountingSampler(len(samples), batch_size=self.batch_size, seed=self.seed, **sharing)
        self._loader = CountingLoader(samples, sampler=sampler, drop_last=True, **self.loader_options(), **options)
        if self._resumed is not None:
            self._loader.load_state_dict(self._resumed)
            self._resumed = None
        return self._loader

    def loader_options(self) -> dict[str, Any]:
        """The DataLoader arguments common to all loaders."""
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return {"batch_size": self.batch_size, **workers}

    def state_dict(self) -> dict[str, Any]:
        """The state of the training loader. Lightning also saves the loader's own state, but restores it only into loaders
        that are made after the checkpoint was read: not if ``estimated_stepping_batches`` was used before."""
        return {} if self._loader is None else dict(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state from which the next training loader starts."""
        self._resumed = state
