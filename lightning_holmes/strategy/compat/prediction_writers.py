"""Lets one rank of each replica write predictions: all ranks of a replica have the same rows, and each would write them.

with writing_once(trainer, writes=is_first_of_its_replica):
    ...                     # write_on_batch_end and write_on_epoch_end are called on that rank only
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.noticed_functions import ALL, NoticedFunctions
from lightning_holmes.pipeline.whole_steps import COLLECTIVES
from lightning_holmes.replacements import Replacements

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def writing_once(trainer: "pl.Trainer", *, writes: bool) -> Iterator[None]:
    """Inside, ``BasePredictionWriter`` callbacks write on one rank of each replica. A replica has several ranks.

    Args:
        writes: whether this rank is the one of its replica that writes.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    with Replacements() as run:
        for callback in callbacks:
            if isinstance(callback, pl.callbacks.BasePredictionWriter):
                write = _alone if writes else _never
                run.replace(callback, **{name: write(trainer, callback, name) for name in _WRITES})
        yield


def _alone(trainer: "pl.Trainer", callback: Any, name: str) -> Callable[..., None]:
    own, raw = getattr(callback, name), NoticedFunctions(torch.distributed, ALL)

    def refuse(collective: str, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedModuleError(
            f"{type(callback).__name__}.{name} calls {collective}, but it is called on one rank of each replica only, since all "
            f"ranks of a replica have the same predictions: call it in on_predict_epoch_end or on_predict_end"
        )

    @functools.wraps(own)
    def write(*args: Any, **kwargs: Any) -> None:
        strategy: Any = trainer.strategy
        with Replacements() as refusing, raw.noticing(refuse):
            refusing.replace(strategy, **{each: functools.partial(refuse, each) for each in COLLECTIVES})
            own(*args, **kwargs)

    return write


def _never(trainer: "pl.Trainer", callback: Any, name: str) -> Callable[..., None]:
    return lambda *args, **kwargs: None
