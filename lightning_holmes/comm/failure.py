"""FailureWatch: when one rank fails, all ranks end; it shows its traceback, and the others one line that names it.

The failure that is first in the job's store, by its compare_set, is the one that all ranks show: an exception, or a
rank of which nothing is heard (heartbeat.py). One thread speaks with the store, by a client of its own; another one
watches whether the store itself is there (job_store.py). Both end ranks that are stuck in a transfer, with any backend.

    watch = FailureWatch(store, rank=0, world_size=4, timeout_s=1800.0)
    watch.explain(error)        # RemoteError if another rank has failed first
    watch.report(error)         # when this rank fails
    watch.stop()                # when its run has ended well
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
from dataclasses import astuple, dataclass, replace
from typing import Any

from lightning_holmes.comm import heartbeat
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.heartbeat import Heartbeat
from lightning_holmes.comm.job_store import StoreWatch, answer_within, end_of
from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import ConnectionLostError, RemoteError, UnevenDataError

_TICK_S = 1.0
_NOTICE_S = 6.0  # a failing rank waits at most this long for the others to read why; busy ranks look late
_CAUSE_S = 6.0  # how long to wait for the rank that says why a connection broke
_GRACE_S = 8.0  # a rank whose connections break ends by itself within this time
_SHORT_GRACE_S = 3.0  # for a rank that mostly cannot end by itself
_ANSWER_S = 4  # a store that has not answered for this long counts as unreachable
_LAST_ANSWER_S = 30.0  # how long a run that ended well waits for the store to answer its last request


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank that failed first, its exception in words, the rank that has told it, where the failed rank was, and its name if it is an
    optimizer node."""

    rank: int
    words: str
    told_by: int
    place: str = ""
    name: str | None = None

    def line(self, who: str) -> str:
        """The line that ``who`` shows when it ends because of this failure."""
        place = f" {self.place}" if self.place else ""
        return f"[{who}] ends, because {self.name or f'rank {self.rank}'} failed{place}: {self.words.splitlines()[0]}"


class FailureWatch:
    """Reports this rank's failure, and watches for failures of other ranks.

    Args:
        store: the job's key-value store.
        rank: this global rank.
        world_size: the number of ranks.
        timeout_s: the timeout of transfers; None: none.
        num_nodes: how many of the ranks, the last ones, are optimizer nodes. Such a watch does not say who is late.

    Attributes:
        heartbeat: says where this rank is; its ``where`` can be set.
        cards: watches the fast cards of this rank; if one stays down, the run ends.
        asked_to_end: on rank 0: another rank has asked to end the run (:meth:`ask_to_end`).
        cause: the failure of the run that was first, as far as it is known.
        ends_process: whether this process ends if another rank has failed, and does not end by itself.
        on_absence: returns whether the last step that this rank has begun is that of a batch; called in a thread.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout_s: float | None = None, *, num_nodes: int = 0
    ) -> None:
        self._store: Any = store.clone() if hasattr(store, "clone") else store
        # ranks start the same runs in the same order, so every rank's own count gives the same number
        self._prefix = f"holmes/run/{self._store.add(f'holmes/runs/{rank}', 1)}"
        self._rank, self._world_size = rank, world_size
        self._nodes = {world_size - num_nodes + n: f"optimizer node {n}" for n in range(num_nodes)}
        self._name = self._nodes.get(rank, f"rank {rank}")
        self.heartbeat = Heartbeat(
            self._store, self._prefix, rank=rank, world_size=world_size, timeout_s=timeout_s, name=self._name
        )
        if num_nodes:
            self.heartbeat.patience = float("inf")
        self.cards: CardWatch | None = None
        self.asked_to_end = False
        self.on_absence: Callable[[int], bool] = lambda batch: False
        self._wake, self._stop, self._gone, self._told = (threading.Event() for _ in range(4))
        self._posts: dict[str, str] = {}  # what the training thread wants to be written
        self._mine: Failure | None = None
        self.cause: Failure | None = None
        self.ends_process = True
        self._absent: tuple[int, int, str] | None = None
        self._is_first = self._well = self._released = False
        self._news = self._exchanges = 0
        self._seconds_silent, self._answered_at = 0, -1
        self._kept_at = end_of(self._store)
        self._store_watch = StoreWatch(self._store, self._lose_store, self._look_at_store)
        self._thread = threading.Thread(target=self._watch, name="holmes-heartbeat", daemon=True)
        self._thread.start()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    # for the thread that trains

    def report(self, exception: BaseException) -> Failure | None:
        """Tell the other ranks why this one ends, and stop the watch. Return the failure that was first, if it is known."""
        atexit.unregister(_see_off)
        if self._mine is None and self._reachable:
            self._mine = Failure(
                self._rank, f"{type(exception).__name__}: {exception}", self._rank, self.heartbeat.where()[0]
            )
            self._wake.set()
            self._told.wait(2 * _NOTICE_S)
        self._end(timeout_s=5.0 if self._reachable else 0.0)
        return self.cause

    def explain(self, exception: BaseException) -> BaseException:
        """Return ``exception``, or its cause if it is only a lost connection: RemoteError if another rank has reported
        a failure, UnevenDataError if this rank has left a batch that others are in."""
        if isinstance(exception, RemoteError) or not is_lost(exception):
            return exception
        end = time.monotonic() + _CAUSE_S
        timed_out = "imed out" in str(exception)
        self.heartbeat.ask(late=timed_out)
        self._wake.set()
        while self.cause is None and time.monotonic() < end and self._reachable:
            if self.heartbeat.answered.wait(0.05):
                if self.heartbeat.silent or timed_out:
                    break
                time.sleep(0.05)
        cause = self.cause
        if cause is None:
            return exception
        kind, _, words = cause.words.partition(": ")
        if cause.rank != self._rank:
            return RemoteError(f"{cause.name or f'rank {cause.rank}'} failed first: {cause.words}")
        return UnevenDataError(words) if kind == UnevenDataError.__name__ else exception

    def stall(self) -> str:
        """What keeps this rank waiting, other ranks or the store, as far as it is known; empty: nothing."""
        return self.heartbeat.late if self._reachable else self._lost_store()

    def ask_to_end(self) -> None:
        """Ask rank 0 to end the run in good order."""
        self._posts.setdefault("end", "1")

    def tell_absence(self, batch: int, words: str) -> None:
        """Tell the other ranks that this rank has left ``batch`` before its step; ``words``: the error if another rank is in that step."""
        self._posts["absent"] = json.dumps([self._rank, batch, words])
        self._wake.set()

    def stop(self, *, at_exit: bool = True) -> None:
        """End the watch after a run that ended well. ``at_exit``: rank 0 waits for the others at the process's exit.

        Wait for a store that is silent because its link was cut a moment ago: a thread whose request returns while the
        interpreter ends is unwound through torch's code, which aborts the process (exit code -6).
        """
        self._well = True
        self._end(timeout_s=_LAST_ANSWER_S)
        if self._rank == 0 and at_exit:
            atexit.unregister(_see_off)  # that of an earlier run
            atexit.register(_see_off, self._store, self._key("left"), self._world_size - 1, self._gone)

    def see_off(self) -> None:
        """On rank 0, after :meth:`stop`: wait until the other ranks no longer need the store, unless one has failed."""
        if self.cause is None and self.ends_process:
            _see_off(self._store, self._key("left"), self._world_size - 1, self._gone)

    def _end(self, timeout_s: float) -> None:
        self._stop.set()
        self._wake.set()
        self._store_watch.stop()
        self._thread.join(timeout_s)

    @property
    def _reachable(self) -> bool:
        """Whether the store has answered lately."""
        return not self._gone.is_set() and self._seconds_silent < _ANSWER_S

    # for the thread that speaks with the store

    def _watch(self) -> None:
        try:
            next_tick = time.monotonic()
            while not self._stop.is_set() and not self._gone.is_set():
                self._wake.wait(max(0.0, next_tick - time.monotonic()))
                self._wake.clear()
                if self._gone.is_set():
                    break
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    self.heartbeat.tick()
                    self._look_for_losses()
                self._exchange()
                if self.cause is not None and not self._well:
                    return self._end_by(self.cause)
            if self._well and not self._gone.is_set():
                self.heartbeat.leave()
                self._leave()
        except Exception as error:
            if is_lost(error):
                self._lose_store()
            else:
                self._fail(error)
        finally:
            self._told.set()

    def _exchange(self) -> None:
        """Write what is to be written, and read what is new."""
        for name in list(self._posts):
            self._post(name, self._posts.pop(name))
        if self._mine is not None and not self._is_first:
            self._put_first(self._mine)
        news = self._store.add(self._key("news"), 0)
        if news != self._news:
            self._news = news
            self.cause = self.cause or self._read_cause()
            self.asked_to_end = self.asked_to_end or (self._rank == 0 and self._store.check([self._key("end")]))
            if self._store.check([self._key("absent")]):
                self._absent = tuple(json.loads(self._store.get(self._key("absent"))))
            if self._rank != 0 and self._store.check([self._key("done")]):
                self._leave()
        if self._absent is not None and self._absent[0] != self._rank and self.on_absence(self._absent[1]):
            self._put_first(Failure(self._absent[0], f"{UnevenDataError.__name__}: {self._absent[2]}", self._rank))
        self._exchanges += 1

    def _post(self, name: str, value: str) -> None:
        self._store.set(self._key(name), value)
        self._store.add(self._key("news"), 1)

    def _put_first(self, failure: Failure) -> None:
        """Make ``failure`` the run's, unless another one was first."""
        mine = json.dumps(astuple(replace(failure, name=self._nodes.get(failure.rank))))
        self._is_first = bytes(self._store.compare_set(self._key("failure"), "", mine)).decode() == mine
        self._store.add(self._key("news"), 1)
        self.cause = self._read_cause()

    def _read_cause(self) -> Failure | None:
        if not self._store.check([self._key("failure")]):
            return None
        return Failure(*json.loads(self._store.get(self._key("failure"))))

    def _look_for_losses(self) -> None:
        """Report a neighbour or a card that is lost."""
        if self.heartbeat.lost is not None:
            rank, words = self.heartbeat.lost
            self._put_first(Failure(rank, f"{ConnectionLostError.__name__}: {words}", self._rank))
        card = None if self.cards is None else self.cards.lost()
        if card is not None:
            words = f"{card}. Started again, the run goes on over Ethernet, or over the card if that is back"
            self._put_first(Failure(self._rank, f"{ConnectionLostError.__name__}: {words}", self._rank))

    def _end_by(self, cause: Failure) -> None:
        """End this rank because of ``cause``, once the others have read it if this process may be the only one that tells them."""
        if not self._is_first:
            self._store.add(self._key("seen"), 1)
        if self._is_first or self._rank == 0:  # the store may end with rank 0
            silent = self.heartbeat.silent | ({cause.rank} if cause.rank != cause.told_by else set())
            end = time.monotonic() + _NOTICE_S
            while self._store.add(self._key("seen"), 0) < self._world_size - 1 - len(silent) and time.monotonic() < end:
                time.sleep(0.05)
        self._told.set()
        if self._mine is None:
            breaks = cause.rank == cause.told_by and not self._is_first  # that rank ends, and with it connections
            self._end_process(cause.line(self._name), _GRACE_S if breaks else _SHORT_GRACE_S)

    def _fail(self, error: Exception) -> None:
        """Report an error of the watch itself: all ranks end, and this one prints the error. A run that is ending anyway goes on to its end."""
        traceback.print_exception(error)
        if self._stop.is_set():
            return
        with contextlib.suppress(Exception):
            self._put_first(Failure(self._rank, one_line(error), self._rank))
        line = f"[{self._name}] ends, because its watch for failures failed: {one_line(error)}"
        self._end_process(line, _SHORT_GRACE_S)

    def _leave(self) -> None:
        """On rank 0: tell the others that its run has ended well. On other ranks: tell rank 0, once, that this rank no longer needs the store."""
        if self._rank == 0:
            self._post("done", "1")
        elif not self._released:
            self._released = True
            self._store.add(self._key("left"), 1)

    def _end_process(self, line: str, grace_s: float) -> None:
        """Print ``line`` and end the process, unless the run ends by itself within a moment, as it mostly does when connections break."""
        if not self._stop.wait(grace_s) and self.ends_process:
            print(line, file=sys.stderr, flush=True)
            os._exit(1)

    # for the thread that watches the store

    def _look_at_store(self) -> bool:
        """Note whether the other thread's requests are answered; end this rank if they are not for long. Return whether to go on."""
        self._seconds_silent = 0 if self._exchanges != self._answered_at else self._seconds_silent + 1
        self._answered_at = self._exchanges
        if self._seconds_silent < heartbeat.SILENT_TICKS or not self._thread.is_alive() or self.cause is not None:
            return True
        self._end_process(f"[{self._name}] ends, because {self._lost_store()}", 0.0)
        return False

    def _lose_store(self) -> None:
        """End this rank because the store's process is gone, unless the cause is known or this rank no longer needs the store."""
        if self._gone.is_set():
            return
        self._gone.set()
        self._wake.set()
        self._told.set()
        if self.cause is None and not self._released:
            self._end_process(f"[{self._name}] ends, because {self._lost_store()}", _GRACE_S)

    def _lost_store(self) -> str:
        at = "" if self._kept_at is None else f" at {self._kept_at[0]}:{self._kept_at[1]}"
        keeper = "the process that keeps it, which is rank 0 or torchrun on rank 0's host,"
        if self._gone.is_set():
            return f"the job's store{at} is gone: {keeper} has ended, or was killed. Look there for the reason"
        return f"the job's store{at} has not answered for {self._seconds_silent} s: {keeper} is stopped or swapped out, or its host is cut off"


def _see_off(store: Any, key: str, number: int, gone: threading.Event) -> None:
    """Wait at the exit of rank 0, whose process may keep the store, until the ``number`` other ranks no longer need it;
    at most _NOTICE_S seconds. Takes no reference to the run, which functions called at exit would keep alive. The thread ends by itself:
    one that is in torch's code when the interpreter ends aborts the process."""
    end = time.monotonic() + _NOTICE_S

    def await_others() -> None:
        with contextlib.suppress(Exception):
            while store.add(key, 0) < number and time.monotonic() < end:
                time.sleep(0.02)

    if not gone.is_set():
        with contextlib.suppress(ConnectionLostError):
            answer_within(await_others, timeout_s=2 * _NOTICE_S)
