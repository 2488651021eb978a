"""Moves: moves a rank's groups to other cards when a fast card is lost, and back when it has returned, during a run.

The rank of the card tells all ranks through the store (failure.py); a thread on each rank then does the same steps:

1. all ranks publish in the store which of their cards are down, and choose each group's cards as at the start;
2. the connections of the movable groups are ended, and with them the transfers under way;
3. all ranks publish how far each of these groups has come, and reconnect them; if that fails, once more without fast cards;
4. missing operations are repeated (movable.py).

    moves = Moves(builder.junction, builder.transports, rank=0, world_size=4)
    moves.begin(store, "holmes/move/1", "the card ... went down", on_lost=end)      # on every rank
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_holmes.comm.answer import answer_within
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.gloo import GlooDevices
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.movable import Junction, MovableGroup
from lightning_holmes.comm.sockets import end_connections
from lightning_holmes.errors import ConnectionLostError

_MEETING_S = 60.0  # longer than an operation takes to end, or a connection to fail
_LEAVING_S = 5.0  # ranks end a run together (FailureWatch.stop), within moments
_PAUSE_S = 0.01
_MOVE_S = 180.0  # limit of a move: if the link to the store is cut, too, its client never returns


@dataclass(frozen=True, slots=True)
class _Place:
    """Where all ranks meet for one move: keys in the store."""

    store: Any
    prefix: str
    rank: int
    world_size: int
    is_over: threading.Event
    has_failed: threading.Event

    def meet(self, value: Any) -> list[Any] | None:
        """Gather each rank's first value; None if the run ends and not all ranks have come: a rank that leaves and a
        rank that has seen all write a verdict to the store, and the first verdict counts for all. Raises
        ConnectionLostError: not all ranks came, and the run goes on."""
        told = self._gather("first", value, self.is_over)
        words = self.store.compare_set(f"{self.prefix}/verdict", "", "left" if told is None else "all")
        if words == b"all":
            return told or self.gather("first", value)
        if not self.is_over.wait(_LEAVING_S):
            raise _missing()
        return None

    def gather(self, what: str, value: Any) -> list[Any]:
        """Gather each rank's value, as plain data. Raises ConnectionLostError: not all ranks came, or the run has failed here."""
        told = self._gather(what, value, self.has_failed)
        if told is None:
            raise _missing()
        return told

    def _gather(self, what: str, value: Any, leaves: threading.Event) -> list[Any] | None:
        self.store.set(f"{self.prefix}/{what}/{self.rank}", json.dumps(value))
        keys = [f"{self.prefix}/{what}/{rank}" for rank in range(self.world_size)]
        end = time.monotonic() + _MEETING_S
        while not self.store.check(keys):
            if time.monotonic() > end or leaves.wait(_PAUSE_S):
                return None
        return [json.loads(self.store.get(key)) for key in keys]


def _missing() -> ConnectionLostError:
    return ConnectionLostError(f"not all ranks have come to the job's store within {_MEETING_S:.0f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move of groups, after a fault that was survived or a card that has returned.

    Attributes:
        why: the fault or the card, in words.
        groups: by group name, the transport that the group uses now.
        at: when the reason was noticed, in seconds since the epoch.
        began_s: the same time by this rank's ``time.perf_counter``.
        seconds: from then until the run went on.
    """

    why: str
    groups: dict[str, str]
    at: float
    began_s: float
    seconds: float

    def describe(self) -> str:
        """The move in words, without its seconds."""
        names = ", ".join(list(self.groups)[:4]) + (", ..." if len(self.groups) > 4 else "")
        now = " and ".join(sorted(set(self.groups.values()))) or "what they used"
        return f"{self.why}. {len(self.groups)} groups ({names}) use {now} now, and what was under way was repeated"

    def to_data(self) -> dict[str, Any]:
        """The move as plain data for JSON."""
        return {"why": self.why, "groups": self.groups, "at": self.at, "seconds": self.seconds}


class Moves:
    """The moves of one rank's groups.

    Args:
        junction: has the groups.
        transports: chooses their cards.

    Attributes:
        cards: the watch of this rank's cards; None: there is none.
        on_done: called with each move that is done, in a thread.
        number: the number of moves that have begun in this run.
    """

    def __init__(self, junction: Junction, transports: GroupTransports, *, rank: int, world_size: int) -> None:
        self.junction = junction
        self.cards: CardWatch | None = None
        self._done: list[Move] = []
        self.on_done: Callable[[Move], None] = lambda move: None
        self.number = 0
        self._transports = transports
        self._rank, self._world_size = rank, world_size
        self._is_over, self._has_failed = threading.Event(), threading.Event()
        self._rests = threading.Event()  # no move is under way
        self._rests.set()

    @property
    def is_moving(self) -> bool:
        """Whether a move is under way."""
        return not self._rests.is_set()

    def settled(self) -> tuple[Move, ...]:
        """The moves that are done, the same on all ranks, including those of earlier runs; waits for a move that is under way."""
        self._rests.wait(_MOVE_S)
        return tuple(self._done)

    def begin_run(self, cards: CardWatch | None) -> None:
        """Watch ``cards``, and count moves from zero, as all ranks do at the beginning of a run."""
        self.cards, self.number = cards, 0
        self._is_over, self._has_failed = threading.Event(), threading.Event()

    def end_run(self, timeout_s: float, *, well: bool) -> None:
        """End a run: all ranks leave a move that not all ranks have joined. Any other move is waited for, so that a
        later run can use the groups; if the run has failed here (not ``well``), it is left. So no thread of a move is
        in a request when the process ends."""
        self._is_over.set()
        if not well:
            self._has_failed.set()
        self._rests.wait(timeout_s)

    def begin(self, store: Any, prefix: str, why: str, on_lost: Callable[[str], None]) -> None:
        """Begin a move, in a thread. Every rank of the job must call.

        Args:
            store: a client of the job's store, for this move alone.
            prefix: the prefix of the move's keys.
            why: the fault, in words.
            on_lost: called with a description if the move fails.
        """
        self._rests.clear()
        self.number += 1

        def move() -> None:
            try:
                place = _Place(store, prefix, self._rank, self._world_size, self._is_over, self._has_failed)
                answer_within(lambda: self._move(place, why), timeout_s=_MOVE_S)
            except Exception as error:
                words = f"{why}. The groups that use it could not be moved to other cards: {str(error).splitlines()[0]}"
                for group in self.junction.groups:
                    if group.is_moving:
                        group.lose(ConnectionLostError(words))
                if not self._has_failed.is_set():
                    on_lost(words)
            finally:
                self._rests.set()

        threading.Thread(target=move, name="holmes-move", daemon=True).start()

    def _move(self, place: _Place, why: str) -> None:
        began_s = time.perf_counter()
        transports, groups = self._transports, list(self.junction.groups)
        mine, devices = [] if self.cards is None else self.cards.down(), self.junction.devices
        told = place.meet([transports.names_of_cards(mine), sorted(devices.ends)])
        if told is None:
            return
        if self.cards is not None:
            self.cards.leave(mine)
        transports.choose_anew((host, card) for down, _ in told for host, card in down)
        for group in groups:
            group.begin_move()
        end_connections(devices.ends, {(address, port) for _, ends in told for address, port in ends})
        for group in groups:
            group.end()
        progress = place.gather("progress", {group.group_name: group.progress() for group in groups})
        self.junction.devices = GlooDevices()
        error = self._connect(place, "connected", groups)
        if error:
            transports.choose_anew(None)
            error = self._connect(place, "connected again", groups)
        if error:
            raise ConnectionLostError(error)
        for group in groups:
            members = [progress[rank].get(group.group_name) for rank in _ranks(group)]
            if None in members:
                raise ConnectionLostError(f"the group {group.group_desc} was being made or ended on some rank")
            group.repeat(members)
        self._tell(place, why, groups, began_s)

    def _connect(self, place: _Place, what: str, groups: Sequence[MovableGroup]) -> str:
        """Connect all groups, in the order that all ranks share; return the error of some rank, or ""."""
        said = ""
        try:
            for group in groups:
                group.reconnect(dist.PrefixStore(f"{place.prefix}/{what}/{group.group_name}", place.store))  # type: ignore[attr-defined]
        except Exception as error:
            said = str(error).splitlines()[0] or type(error).__name__
        return next(filter(None, place.gather(what, said)), "")

    def _tell(self, place: _Place, why: str, groups: Iterable[MovableGroup], began_s: float) -> None:
        """Record the move, and let rank 0 print a line about it."""
        moved = {group.group_desc: self._transports.describe(_ranks(group))[0] for group in groups}
        everyone: dict[str, str] = {}
        for of_rank in place.gather("moved", moved):
            everyone |= of_rank
        seconds = time.perf_counter() - began_s
        move = Move(why=why, groups=everyone, at=time.time() - seconds, began_s=began_s, seconds=seconds)
        self._done.append(move)
        self.on_done(move)
        if self._rank == 0:
            print(f"{move.describe()}; {seconds:.1f} s after it was noticed the run goes on", flush=True)


def _ranks(group: MovableGroup) -> list[int]:
    return dist.get_process_group_ranks(group)
