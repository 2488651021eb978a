"""FailureWatch: when one rank fails, all ranks end; it shows its traceback, and the others one line that names it.

The rank that fails first writes its exception to the job's store. A thread on every rank polls the store: it ends ranks
that are stuck in a transfer, and gives the cause to ranks whose connections break. If the process that keeps the store
is gone, no run goes on: every rank says so and ends. An error of the thread itself is a failure like any other.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_holmes.comm.answer import answer_within
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.stalls import Stalls
from lightning_holmes.comm.store_watch import StoreWatch, end_of
from lightning_holmes.comm.stragglers import Stragglers
from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import ConnectionLostError, RemoteError, UnevenDataError

_KEY = "failure"
_FIRST_KEY = "first"
_SEEN_KEY = "seen"
_END_KEY = "end"
_ABSENT_KEY = "absent"
_DONE_KEY = "done"
_LEFT_KEY = "left"
_NOTICE_S = 6.0  # a failing rank waits at most this long for the others to read why; busy ranks look late
_POLL_S = 1.0
_SILENCE_S = 4.0  # a store that has not answered for this long counts as unreachable
_ASK_S = 1.0  # for one more request to a silent store: on a busy machine it is the watch that is late
_CAUSE_S = 6.0  # how long to wait for the rank that says why a connection broke; busy machines look seldom
_GRACE_S = 8.0
_LAST_ANSWER_S = 30.0  # how long a run that ended well waits for the store to answer its last request


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank that failed first, and its exception in words."""

    rank: int
    words: str

    def line(self, rank: int) -> str:
        """The line that ``rank`` shows when it ends because of this failure."""
        return f"[rank {rank}] ends, because rank {self.rank} failed: {self.words.splitlines()[0]}"


class FailureWatch:
    """Reports this rank's failure, and watches for failures of other ranks.

    Args:
        store: the job's key-value store.
        rank: this global rank.
        world_size: the number of ranks.
        timeout_s: the timeout of transfers; None: none.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float | None = None) -> None:
        self._store: Any = store.clone() if hasattr(store, "clone") else store
        # ranks start the same runs in the same order, so every rank's own count gives the same number
        self._run = self._store.add(f"holmes/runs/{rank}", 1)
        self._rank = rank
        self._world_size = world_size
        self._stop = threading.Event()
        self._noticed = False
        self._asked = False
        self.asked_to_end = False
        """On rank 0: another rank has asked to end the run (:meth:`ask_to_end`)."""
        self.cards: CardWatch | None = None
        """Watches the fast cards of this rank; if one stays down, the run ends."""
        self.on_absence: Callable[[int], bool] = lambda batch: False
        """Returns whether the last step that this rank has begun is that of ``batch``; called in the watch's thread."""
        self.on_end: Callable[[str], None] = lambda line: None
        """Called with the line that this rank shows, before the watch ends its process."""
        self._cause: Failure | None = None
        self._grace_s = _GRACE_S
        self._answered = time.monotonic()
        self._gone = threading.Event()
        self._silent: frozenset[int] = frozenset()  # ranks that did not answer when this rank was about to fail
        self._well = self._released = False  # this rank's run has ended well; this rank no longer needs the store
        self._kept_at = end_of(self._store)
        self._store_watch = StoreWatch(self._store, self._lose_store)
        self.stalls = Stalls(
            self._store, f"holmes/run/{self._run}", rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        self.stragglers = Stragglers(self._store, f"holmes/run/{self._run}", rank=rank, world_size=world_size)
        self._thread = threading.Thread(target=self._watch, name="holmes-failure-watch", daemon=True)
        self._thread.start()

    def _key(self, name: str) -> str:
        return f"holmes/run/{self._run}/{name}"

    def report(self, exception: BaseException) -> Failure | None:
        """Tell the other ranks why this one ends, and stop the watch. Only the first report of a run counts; it is returned, if it is known."""
        atexit.unregister(_see_off)
        if self._answers():
            _in_thread(lambda: self._tell(exception), timeout_s=2 * _NOTICE_S)
        self._end(timeout_s=5.0 if self._reachable() else 0.0)
        return self._cause

    def _reachable(self) -> bool:
        """Whether the store has answered in the last _SILENCE_S seconds."""
        return not self._gone.is_set() and time.monotonic() - self._answered < _SILENCE_S

    def _answers(self) -> bool:
        """Whether the store has answered lately, or answers a request now."""
        if not self._reachable() and not self._gone.is_set():
            _in_thread(self._ask, timeout_s=_ASK_S)
        return self._reachable()

    def _ask(self) -> None:
        with contextlib.suppress(Exception):
            self._cause = self._look() or self._cause
            self._answered = time.monotonic()

    def _tell(self, exception: BaseException) -> None:
        with contextlib.suppress(Exception):  # the rank that keeps the store may be gone; then no rank can be told
            end = time.monotonic() + _NOTICE_S
            mine = Failure(self._rank, f"{type(exception).__name__}: {exception}")
            if isinstance(exception, RemoteError) or not self._tell_first(mine):
                while self._cause is None and time.monotonic() < end:  # the rank that failed first is about to report
                    self._cause = self._look()
                    time.sleep(0.02)
                self._notice()
                if self._rank != 0:
                    return  # rank 0 waits as long as the first rank: the store ends with it
            while self._store.add(self._key(_SEEN_KEY), 0) < self._hearing() and time.monotonic() < end:
                time.sleep(0.05)

    def _hearing(self) -> int:
        """The number of other ranks that may read a report: those that did not answer before (their host is cut off) do not count."""
        self._silent |= self.stalls.silent
        return self._world_size - 1 - len(self._silent - {self._rank})

    def _tell_first(self, failure: Failure) -> bool:
        """Report ``failure``, unless another one was reported before; return whether it was reported."""
        if self._store.add(self._key(_FIRST_KEY), 1) > 1:
            return False
        self._cause = failure
        self._store.set(self._key(_KEY), json.dumps([failure.rank, failure.words]))
        return True

    def _notice(self) -> None:
        """Tell the rank that failed first, which waits for this, that this rank has read its report."""
        if not self._noticed:
            self._noticed = True
            self._store.add(self._key(_SEEN_KEY), 1)

    def _look(self) -> Failure | None:
        """The failure that was reported first, if any."""
        if self._store.check([self._key(_KEY)]):
            return Failure(*json.loads(self._store.get(self._key(_KEY))))
        return None

    def ask_to_end(self) -> None:
        """Ask rank 0 to end the run in good order."""
        if not self._asked:
            self._asked = True
            self._store.set(self._key(_END_KEY), "1")

    def tell_absence(self, batch: int, words: str) -> None:
        """Tell the other ranks that this rank has left ``batch`` before its step; ``words``: the error if another rank is in that step."""
        self._store.set(self._key(_ABSENT_KEY), json.dumps([self._rank, batch, words]))

    def _compare_absence(self) -> None:
        """Report a failure if this rank waits in a batch that another rank has left; both ranks end."""
        if not self._store.check([self._key(_ABSENT_KEY)]):
            return
        rank, batch, words = json.loads(self._store.get(self._key(_ABSENT_KEY)))
        if rank == self._rank or not self.on_absence(batch):
            return
        self._grace_s = _SILENCE_S  # this rank's step never ends by itself; the other rank must read the report first
        self._tell_first(Failure(rank, f"{UnevenDataError.__name__}: {words}"))

    def _look_at_cards(self) -> bool:
        """End the run on all ranks if a card of this rank stays down; return whether it ends."""
        lost = None if self.cards is None else self.cards.lost()
        if lost is None:
            return False
        words = f"{lost}. Started again, the run goes on over Ethernet, or over the card if that is back"
        self._tell_first(Failure(self._rank, f"{ConnectionLostError.__name__}: {words}"))
        self._grace_s = _SILENCE_S  # the others read the report meanwhile
        self._end_process(f"[rank {self._rank}] ends, because {words}")
        return True

    def explain(self, exception: BaseException) -> BaseException:
        """Return ``exception``, or its cause if it is only a lost connection: RemoteError if another rank has reported
        a failure, UnevenDataError if this rank has left a batch that others are in."""
        if isinstance(exception, RemoteError) or not is_lost(exception):
            return exception
        end = time.monotonic() + _CAUSE_S
        self._answers()
        # the watch's thread looks: a request to the store may never return
        while self._cause is None and time.monotonic() < end and self._reachable() and not self._is_alone():
            time.sleep(0.05)
        cause = self._cause
        if cause is None:
            return exception
        if cause.rank == self._rank:
            kind, _, words = cause.words.partition(": ")
            return UnevenDataError(words) if kind == UnevenDataError.__name__ else exception
        return RemoteError(f"rank {cause.rank} failed first: {cause.words}")

    def _is_alone(self) -> bool:
        """Whether no other rank can report a cause."""
        return self._world_size > 1 and self._hearing() == 0

    def stall(self) -> str:
        """What keeps this rank waiting, other ranks or the store, as far as it is known; empty: nothing."""
        if self._reachable() or self._kept_at is None:
            return self.stalls.told
        place = f"the job's store at {self._kept_at[0]}:{self._kept_at[1]}"
        if self._gone.is_set():
            return f"{place} is gone: the process that keeps it, rank 0 or torchrun on its host, has ended"
        silent_s = time.monotonic() - self._answered
        return (
            f"{place} has not answered for {silent_s:.0f} s: the process that keeps it, rank 0 or torchrun on its host, is stopped or "
            f"swapped out, or its host is cut off"
        )

    def stop(self) -> None:
        """End the watch after a run that ended well.

        Wait for a store that is silent because its link was cut a moment ago: a thread whose request returns while the
        interpreter ends is unwound through torch's code, which aborts the process (exit code -6).
        """
        self._well = True
        self._end(timeout_s=_LAST_ANSWER_S)
        if self._rank == 0:
            atexit.unregister(_see_off)  # that of an earlier run
            atexit.register(_see_off, self._store, self._key(_LEFT_KEY), self._world_size - 1, self._gone)

    def _end(self, timeout_s: float) -> None:
        self._stop.set()
        self._store_watch.stop()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_POLL_S) and not self._gone.is_set():
                if self._rank == 0 and not self.asked_to_end:
                    self.asked_to_end = self._store.check([self._key(_END_KEY)])
                if self._look_at_cards():
                    return
                self._compare_absence()
                self.stalls.look()
                self.stragglers.look(waits=self.stalls.waits(), now=time.monotonic())
                self._leave()
                self._cause = cause = self._look() or self._cause
                self._answered = time.monotonic()
                if cause is not None and cause.rank != self._rank:
                    self._notice()
                    if not self._well:
                        return self._end_process(cause.line(self._rank))
            if self._well and not self._gone.is_set():
                self._leave()
        except Exception as error:
            if is_lost(error):
                self._lose_store()
            else:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report an error of the watch itself: all ranks end, and this one prints the error. A run that is ending anyway goes on to its end."""
        traceback.print_exception(error)
        if self._stop.is_set():
            return
        try:
            self._tell_first(Failure(self._rank, one_line(error)))
        except Exception as lost:
            if not is_lost(lost):
                raise
        self._grace_s = _SILENCE_S  # the others read the report meanwhile
        self._end_process(f"[rank {self._rank}] ends, because its watch for failures failed: {one_line(error)}")

    def _leave(self) -> None:
        """On rank 0: tell the others that its run has ended well. On other ranks: tell rank 0, once, that this rank no longer needs the store."""
        if self._rank == 0:
            if self._well:
                self._store.set(self._key(_DONE_KEY), "1")
        elif not self._released and (self._well or self._store.check([self._key(_DONE_KEY)])):
            self._released = True
            self._store.add(self._key(_LEFT_KEY), 1)

    def _lose_store(self) -> None:
        """End this rank because the store's process is gone, unless the cause is known or this rank no longer needs the store."""
        if self._gone.is_set():
            return
        self._gone.set()
        if self._cause is not None or self._released:
            return
        place = "" if self._kept_at is None else f" at {self._kept_at[0]}:{self._kept_at[1]}"
        self._end_process(
            f"[rank {self._rank}] ends, because the job's store{place} is gone: the process that keeps it, which is rank 0 or "
            f"torchrun on rank 0's host, has ended, or was killed. Look there for the reason"
        )

    def _end_process(self, line: str) -> None:
        """Print ``line`` and end the process, unless the run ends by itself within a moment, as it mostly does when connections break."""
        if not self._stop.wait(self._grace_s):
            try:
                print(line, file=sys.stderr, flush=True)
                self.on_end(line)
            finally:
                os._exit(1)


def _see_off(store: Any, key: str, number: int, gone: threading.Event) -> None:
    """Wait at the exit of rank 0, whose process may keep the store, until the ``number`` other ranks no longer need it;
    at most _NOTICE_S seconds. Takes no reference to the run, which functions called at exit would keep alive."""

    def await_others() -> None:
        with contextlib.suppress(Exception):
            while store.add(key, 0) < number:
                time.sleep(0.02)

    if not gone.is_set():
        _in_thread(await_others, timeout_s=_NOTICE_S)


def _in_thread(act: Callable[[], None], *, timeout_s: float) -> None:
    """Call ``act`` in a thread, and wait at most ``timeout_s``: if the network to the store is cut, a request to it does not return."""
    with contextlib.suppress(ConnectionLostError):
        answer_within(act, timeout_s=timeout_s)
