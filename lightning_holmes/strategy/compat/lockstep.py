"""Lockstep: checks that all ranks are at the same place of the training loop; if not, all end, and say which rank was where.

Lightning broadcasts a message from rank 0 before each batch, for SIGTERM. Here the message also contains the place of rank 0, and is also
sent before validation, at the end of an epoch and at the end of the fit. If ranks go to different places, one of them receives a
place that differs from its own. Without this check, the rank that continues would wait for the others until the timeout.

    with Lockstep(trainer, signals, group):
        ...

If a rank alone skips a batch after its message (``on_train_batch_start`` returns -1), the other ranks are already in
the batch's step: the rank that has skipped it says so in the store, which each rank's watch for failures reads.

Signals are handled by signals.py. That the stages of a replica have the same number of batches is checked where they
compare their batches (pipeline/steps.py), also in evaluation.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Self

import torch
import torch.distributed as dist

from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.errors import UnevenDataError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import BEFORE_BATCH
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.compat.signals import BatchSignals
from lightning_holmes.strategy.snapshots import Snapshots

_SNAPSHOT = 8  # a value of the message in addition to those of signals.py


class Place(IntEnum):
    """The places of the training loop at which ranks meet."""

    BATCH = 0
    VALIDATION = 1
    END_OF_EPOCH = 2
    END_OF_FIT = 3


_DOES = {
    Place.BATCH: "has another batch",
    Place.VALIDATION: "goes to validation",
    Place.END_OF_EPOCH: "has left its epoch",
    Place.END_OF_FIT: "has come to the end of the fit",
}


class Lockstep(Replacements):
    """Keeps the processes of a fit in lockstep.

    Args:
        signals: the signals that rank 0 has received, which are sent with the message before each batch.
        group: a process group of all ranks for CPU tensors, so that no device is waited for; None: WORLD is such a group.
        explaining: returns a context that turns a lost connection into an error that names the group.
        watch: reports to the other ranks that this rank has skipped a batch; None after a failure.
        snapshots: taken before a batch when rank 0 says so; None: never.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        signals: BatchSignals,
        group: dist.ProcessGroup | None,
        explaining: Callable[[], AbstractContextManager[None]] = nullcontext,
        watch: FailureWatch | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._signals = signals
        self._group = group
        self._explaining = explaining
        self._watch = watch
        self._snapshots = snapshots
        # the number of announced batches, and the last of them whose step this rank has begun
        self._announced = self._begun = 0

    def __enter__(self) -> Self:
        loop: Any = self._trainer.fit_loop
        validation = loop.epoch_loop.val_loop
        self.replace(loop.epoch_loop, **{BEFORE_BATCH: self._before_batch})
        self.replace(validation, run=self._meeting(Place.VALIDATION, validation.run))
        self.replace(loop, on_advance_end=self._meeting(Place.END_OF_EPOCH, loop.on_advance_end))
        self.replace(loop, on_run_end=self._meeting(Place.END_OF_FIT, loop.on_run_end))
        if self._watch is not None:
            self.replace(self._watch, on_absence=lambda batch: self._begun == batch)
        return self

    def begin_step(self) -> None:
        """Note that this rank's step of the announced batch begins."""
        self._begun = self._announced

    def _before_batch(self) -> None:
        asked = _SNAPSHOT if self._snapshots is not None and self._snapshots.is_due else 0
        wanted = self._meet(Place.BATCH, self._signals.wanted() or asked)
        if wanted == _SNAPSHOT and self._snapshots is not None:
            self._snapshots.take()
        else:
            self._signals.obey(wanted)

    def _meeting(self, place: Place, function: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def meet_first() -> Any:
            self._meet(place)
            return function()

        return meet_first

    def _meet(self, place: Place, wanted: int = 0) -> int:
        """Check that this rank is at the same place as rank 0, and return what rank 0 wants to be done.

        Raises:
            UnevenDataError: ranks are at different places.
        """
        trainer = self._trainer
        left = place != Place.BATCH and self._begun < self._announced
        if place == Place.BATCH:
            self._announced += 1
        elif left:
            self._tell_absence(place)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        mine = [int(place), progress.total.ready, int(trainer.should_stop), int(progress.is_last_batch)]
        message = torch.tensor([wanted, *mine])
        try:
            dist.broadcast(message, src=0, group=self._group)
        except Exception as error:
            if left or "imed out" in str(error):  # else the batch would wait for the timeout once more
                with self._explaining():
                    raise
            return 0  # as in Lightning: the broken connection shows in the batch, with its reason
        wanted, *rank_0s = message.tolist()
        everyone = {0: rank_0s, trainer.global_rank: mine}
        if rank_0s[0] != Place.BATCH:  # all ranks receive this, and none is in a batch yet
            with self._explaining():
                everyone = dict(enumerate(all_gather_values(mine)))
        if len({tuple(at[:2]) for at in everyone.values()}) > 1:
            raise UnevenDataError(describe_places(everyone, trainer.current_epoch))
        return int(wanted)

    def _tell_absence(self, place: Place) -> None:
        if self._watch is not None:
            rank = self._trainer.global_rank
            words = (
                f"rank {rank} has left a training batch before its step, in epoch {self._trainer.current_epoch}, and "
                f"{_DOES[place].removeprefix('has ')}; other ranks are in that step and would wait for it: "
                f"on_train_batch_start must return -1 on all ranks or on none"
            )
            self._watch.tell_absence(self._announced, words)


def describe_places(everyone: Mapping[int, Sequence[int]], epoch: int) -> str:
    """Return the error message for ranks at different places.

    Args:
        everyone: for each rank its place, the number of batches since the start, whether should_stop is set, and whether the last batch was the
            last of its data.
        epoch: the current epoch.
    """
    at: dict[tuple[int, ...], list[int]] = {}
    for rank, where in sorted(everyone.items()):
        at.setdefault(tuple(where), []).append(rank)
    told = "; ".join(
        f"{_ranks(ranks)}: {'has no other batch' if place and ended else _DOES[Place(place)]} after {batches} batches"
        f"{', should_stop set' if stops else ''}"
        for (place, batches, stops, ended), ranks in at.items()
    )
    if len({where[2] for where in at}) > 1:
        return (
            f"the ranks stop at different places, in epoch {epoch}: {told}. Set trainer.should_stop on all ranks at once: "
            f"trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)"
        )
    return (
        f"the ranks' training data end unevenly, in epoch {epoch}: {told}. Every rank needs as many batches: shard the samples "
        f"evenly over the replicas, or set limit_train_batches to the smallest number that a rank has"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
