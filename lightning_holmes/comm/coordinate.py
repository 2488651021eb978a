"""The data-parallel coordinate: which part of the data this process must read.

All stages of one replica must read the same samples, so data that shards itself must use this coordinate, not the rank.

    class Lines(IterableDataset):
        def __iter__(self):
            rank, size = data_parallel_coordinate()
            return itertools.islice(open("lines.txt"), rank, None, size)

The strategy publishes the coordinate in the environment, so that data loaders' workers have it too, however they are
started.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lightning_holmes.errors import ConfigurationError

_VARIABLE = "HOLMES_DATA_PARALLEL"  # "1/4": the second of four replicas


def publish_coordinate(coordinate: tuple[int, int] | None) -> None:
    """Publish the replica's index and the number of replicas to this process and those that it starts; None: the run is over."""
    if coordinate is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = f"{coordinate[0]}/{coordinate[1]}"


def data_parallel_coordinate(*, workers: bool = False) -> tuple[int, int]:
    """The index of this process's replica, and the number of replicas.

    Available once the trainer has set up the processes: in a data module's ``setup``, in ``__iter__`` of a data set, in
    data loaders' workers. Under other strategies every process is a replica.

    Args:
        workers: count the workers of each replica's data loader as parts, too, so that each worker reads its own part.
            Outside a worker this changes nothing.

    Raises:
        ConfigurationError: there are several processes, but the trainer has not set them up yet.
    """
    rank, size = _replica()
    worker = get_worker_info() if workers else None
    if worker is None:
        return rank, size
    return rank * worker.num_workers + worker.id, size * worker.num_workers


def _replica() -> tuple[int, int]:
    published = os.environ.get(_VARIABLE)
    if published is not None:
        rank, size = published.split("/")
        return int(rank), int(size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigurationError(
            f"data_parallel_coordinate() was asked before the trainer set up the {world_size} processes of this job: ask for it "
            "in the data set's __iter__ or in the data module's setup(), not in __init__"
        )
    return 0, 1
