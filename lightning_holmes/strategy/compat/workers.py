"""Seeds of data loaders' workers, by the data-parallel coordinate, for as long as a run lasts.

with seeded_workers(dataloader, rank): ...
"""

import functools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader


@contextmanager
def seeded_workers(dataloader: "DataLoader[Any]", rank: int) -> Iterator[None]:
    """Inside, workers are seeded where the user has asked for it and not done it: by ``rank``, as Lightning does."""
    if not int(os.environ.get("PL_SEED_WORKERS", 0)) or dataloader.worker_init_fn is not None:
        yield
        return
    dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=rank)
    loader = weakref.ref(dataloader)
    del dataloader  # which may go before the run ends
    try:
        yield
    finally:
        given = loader()
        if given is not None:
            given.worker_init_fn = None
