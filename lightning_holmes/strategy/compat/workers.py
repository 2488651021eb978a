"""Seeds the workers of data loaders by the data-parallel rank, for the duration of a run.

with seeded_workers(dataloader, rank): ...
"""

import functools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from lightning_holmes.lightning_package import fabric


@contextmanager
def seeded_workers(dataloader: "DataLoader[Any]", rank: int) -> Iterator[None]:
    """Inside, workers are seeded by ``rank``, as Lightning does, if the user has asked for it (PL_SEED_WORKERS) and has set no worker_init_fn."""
    if not int(os.environ.get("PL_SEED_WORKERS", 0)) or dataloader.worker_init_fn is not None:
        yield
        return
    dataloader.worker_init_fn = functools.partial(fabric.utilities.seed.pl_worker_init_function, rank=rank)
    loader = weakref.ref(dataloader)
    del dataloader  # the loader may be collected before the run ends
    try:
        yield
    finally:
        given = loader()
        if given is not None:
            given.worker_init_fn = None
