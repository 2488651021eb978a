"""Callbacks of ours among a trainer's, for as long as a run lasts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl


@contextmanager
def extra_callbacks(
    trainer: "pl.Trainer", *, first: Sequence[pl.Callback] = (), last: Sequence[pl.Callback] = ()
) -> Iterator[None]:
    """Inside, the trainer has these callbacks too, ahead of its own and after them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [*first, *callbacks, *last]
    try:
        yield
    finally:
        ours = {id(callback) for callback in (*first, *last)}
        callbacks[:] = [callback for callback in callbacks if id(callback) not in ours]
