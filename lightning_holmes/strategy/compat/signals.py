"""SIGTERM, Ctrl-C, and SLURM's signal before a job is requeued: handled between two training batches, on all ranks before the same batch.

Lightning's handlers act when the signal arrives, in the middle of a batch, while other stages wait for this one. Here the handlers only
note the signal; before each batch rank 0 tells all ranks, in the message of lockstep.py. A signal that only other ranks have received is
reported to rank 0 through the job's store. If the fit takes snapshots, a last one is taken. The second Ctrl-C or SIGTERM ends a process at once.

    with BatchSignals(trainer, watch) as signals:
        ...
        signals.ends_together
"""

import signal
import sys
import threading
import time
from typing import Any, Self

import torch.distributed as dist

from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.comm.interrupt import ends_by_second_signal
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import ON_REQUEUE, ON_SIGTERM, signal_connector
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.compat.extra_callbacks import extra_callbacks
from lightning_holmes.strategy.snapshots import Snapshots

_GO_ON, _END, _REQUEUE, _INTERRUPT = 0, 1, 2, 3
_LEFT_BEHIND = 128 + signal.SIGTERM
"""The exit code of a rank that has not received the signal itself, so that a launcher restarts it."""
_FOR_STEP_S = 10.0
"""How long ranks wait, once told to end, for the rest of an accumulation window, in which no snapshot can be taken; SIGKILL comes after 30 s."""


class BatchSignals(Replacements):
    """Handles the signals of a trainer with several processes. Must be entered before Lightning registers its handlers.

    Args:
        watch: communicates with rank 0 outside of collectives; None after a failure.
        snapshots: takes a last snapshot before all ranks end; None: the fit takes none.
    """

    def __init__(self, trainer: "pl.Trainer", watch: FailureWatch | None, snapshots: Snapshots | None = None) -> None:
        super().__init__()
        self._trainer = trainer
        self._watch = watch
        self._snapshots = snapshots
        self._connector: Any = signal_connector(trainer)
        self._told_to_end = False
        self._told_to_requeue: int | None = None
        self._interrupted = False
        self._waits_since: float | None = None
        self.ends_together = False
        """Whether a signal has ended the loops of all ranks before the same batch, and no rank has failed."""

    def __enter__(self) -> Self:
        self._save_and_requeue = getattr(self._connector, ON_REQUEUE)
        self.replace(self._connector, **{ON_SIGTERM: self._note_sigterm, ON_REQUEUE: self._note_requeue})
        defaults = (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)
        heard = [number for number, handler in defaults if signal.getsignal(number) is handler]  # and not by the user
        if heard and self._trainer.training and threading.current_thread() is threading.main_thread():
            self.enter_context(ends_by_second_signal(heard))
            if signal.SIGINT in heard:
                self.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
                self.enter_context(extra_callbacks(self._trainer, first=[_HearsAgain(self)]))
        return self

    def hear_interrupts(self) -> None:
        """Note the first Ctrl-C; the second one is handled by comm/interrupt.py."""
        signal.signal(signal.SIGINT, self._note_interrupt)

    def _note_interrupt(self, signum: int, _: Any) -> None:
        self._interrupted = True
        print(
            f"[rank {dist.get_rank()}] Ctrl-C: all ranks end before the next batch; press it once more to end this one at once",
            file=sys.stderr,
            flush=True,
        )

    def _note_sigterm(self, signum: int, _: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._told_to_end and launcher is not None:
            launcher.kill(signum)
        self._told_to_end = True
        if not self._trainer.training:
            self._connector.received_sigterm = True  # evaluation ends at once

    def _note_requeue(self, signum: int, _: Any) -> None:
        self._told_to_requeue = signum

    def wanted(self) -> int:
        """Return what all ranks shall do before the next batch, by the signals that this rank knows; rank 0's value counts."""
        wanted = self._told()
        if wanted != _GO_ON and self._snapshots is not None and self._snapshots.is_accumulating:
            self._waits_since = self._waits_since or time.monotonic()
            if time.monotonic() - self._waits_since < _FOR_STEP_S:
                return _GO_ON
        return wanted

    def _told(self) -> int:
        if self._interrupted:
            return _INTERRUPT
        rank_0_told = self._told_to_end or (self._watch is not None and self._watch.asked_to_end)
        return _END if rank_0_told else _GO_ON if self._told_to_requeue is None else _REQUEUE

    def obey(self, wanted: int) -> None:
        """Do what rank 0's :meth:`wanted` says; all ranks must call.

        Raises:
            SIGTERMException, KeyboardInterrupt: the run ends on all ranks.
        """
        if wanted in (_END, _INTERRUPT):
            dist.barrier()
            if self._snapshots is not None:
                self._snapshots.take_last()
            self.ends_together = True
            if wanted == _INTERRUPT:
                raise KeyboardInterrupt
            self._connector.received_sigterm = True
            goes_on = self._snapshots is not None and not self._told_to_end
            if goes_on:
                print(
                    f"[rank {dist.get_rank()}] ends before the next batch with exit code {_LEFT_BEHIND}, since another rank got SIGTERM; a launcher "
                    f"that restarts processes starts it again",
                    file=sys.stderr,
                    flush=True,
                )
            ended = pl.utilities.exceptions.SIGTERMException
            raise ended(_LEFT_BEHIND) if goes_on else ended
        if wanted == _REQUEUE:
            self._told_to_requeue = None
            if self._snapshots is not None:
                self._snapshots.take_last()
            self._save_and_requeue(wanted, None)
        elif (self._told_to_end or self._interrupted) and self._watch is not None:
            self._watch.ask_to_end()


class _HearsAgain(pl.Callback):
    """Sets the SIGINT handler when training starts, since Lightning before that notes the handlers to restore at the end; and again after a
    KeyboardInterrupt: Lightning then ignores SIGINT, also one that shall end a save that hangs."""

    def __init__(self, signals: BatchSignals) -> None:
        self._signals = signals

    def on_train_start(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        self._signals.hear_interrupts()

    def on_exception(self, trainer: "pl.Trainer", module: "pl.LightningModule", exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self._signals.hear_interrupts()
