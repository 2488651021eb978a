"""Adds callbacks to a trainer for the duration of a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_holmes.lightning_package import pl


@contextmanager
def extra_callbacks(
    trainer: "pl.Trainer", *, first: Sequence[pl.Callback] = (), last: Sequence[pl.Callback] = ()
) -> Iterator[None]:
    """Inside, the trainer also has these callbacks: ``first`` before its own, ``last`` after them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [*first, *callbacks, *last]
    try:
        yield
    finally:
        ours = {id(callback) for callback in (*first, *last)}
        callbacks[:] = [callback for callback in callbacks if id(callback) not in ours]
