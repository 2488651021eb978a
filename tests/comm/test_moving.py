"""A movable group whose operations end late, in another order or not at all, and moves at the end of a run.

Its connections are simulated: each operation on them ends when the test says so.
"""

import random
import threading
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm import failure, movable
from lightning_holmes.comm.movable import Junction, MovableGroup
from lightning_holmes.comm.moves import Moves


class MadeUpWork:
    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.is_over = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        assert self.is_over.wait(60)
        return True


class MadeUpConnection:
    """Records the operations that were begun on it, with their tensors' first values."""

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.begun: list[tuple[str, float]] = []
        self.works: list[MadeUpWork] = []

    def _begin(self, what: str, tensors: list[Tensor]) -> MadeUpWork:
        self.begun.append((what, float(tensors[0].view(-1)[0])))
        self.works.append(MadeUpWork(tensors))
        if self.ends:
            self.works[-1].is_over.set()
        return self.works[-1]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MadeUpWork:
        return self._begin("send", tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MadeUpWork:
        tensors[0].zero_()
        return self._begin("receive", tensors)

    def broadcast(self, tensors: list[Tensor]) -> MadeUpWork:
        return self._begin("broadcast", tensors)


class Made:
    """A movable group of two on simulated connections, each of which ends its operations by itself or not at all."""

    def __init__(self, *ends: bool) -> None:
        self.connections = [MadeUpConnection(ends=each) for each in ends]
        coming = iter(self.connections)
        self.junction = Junction(None)
        self.group = MovableGroup(lambda store: next(coming), 0, 2, timedelta(seconds=60), self.junction)

    def move(self, others_progress: dict[str, Any]) -> None:
        self.group.begin_move()
        self.group.end()
        mine = self.group.progress()
        self.group.reconnect(None)
        self.group.repeat([mine, others_progress])


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the abandoned connections, on which an operation hangs that nobody waits for."""
    found: list[Any] = []
    monkeypatch.setattr(movable, "_ENDED_S", 0.0)
    monkeypatch.setattr(movable, "leave_for_good", found.append)
    return found


NOTHING = {"collectives": 0, "received": []}


def test_tensors_that_were_waited_for_in_another_order_are_sent_again_in_their_own() -> None:
    made = Made(True, True)
    first, second, third = (made.group.send([torch.full((2,), float(n))], 1, 0) for n in (1, 2, 3))
    second.wait()
    third.wait()
    made.move(NOTHING)
    assert made.connections[1].begun == [("send", 1.0), ("send", 2.0), ("send", 3.0)]
    first.wait()


def test_what_comes_after_the_others_were_told_that_it_has_not_is_not_taken() -> None:
    made = Made(False, True)
    tensor = torch.full((1,), -1.0)
    work = made.group.recv([tensor], 1, 0)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    (old,) = made.connections[0].works
    with made.junction.changed:
        assert made.junction.changed.wait_for(lambda: work._operation.waiting is not None, timeout=60)
        waiting = work._operation.waiting
        made.group.begin_move()
        made.group.end()
        told = made.group.progress()
        old.tensors[0].fill_(5.0)
        waiting.is_over = True  # as its thread does, before the waiter has seen the move
        made.junction.changed.notify_all()
    waiter.join(0.2)
    assert waiter.is_alive() and told == NOTHING and not work.is_completed()
    made.group.reconnect(None)
    made.connections[1].ends = False
    made.group.repeat([told, NOTHING])
    (new,) = made.connections[1].works
    new.tensors[0].fill_(7.0)
    new.is_over.set()
    waiter.join(60)
    assert tensor.item() == 7.0
    old.is_over.set()


def test_a_waiter_that_is_woken_only_after_the_move_waits_for_what_was_repeated() -> None:
    """The wait on the old connection never ends, like that for a tensor which was only partly sent."""
    made = Made(False, True)
    tensor = torch.full((1,), -1.0)
    work = made.group.recv([tensor], 1, 0)
    waiter = threading.Thread(target=work.wait, daemon=True)
    waiter.start()
    with made.junction.changed:
        assert made.junction.changed.wait_for(lambda: work._operation.waiting is not None, timeout=60)
        made.move(NOTHING)  # the whole move, while the waiter may not run
    waiter.join(10)
    is_over = not waiter.is_alive()
    made.connections[0].works[0].is_over.set()
    assert is_over and tensor.item() == 0.0


def test_connections_are_left_where_a_repeated_operation_hangs_that_nobody_waits_for(left: list[Any]) -> None:
    made = Made(True, False, True)
    made.group.collective("broadcast", ([torch.ones(1)],), {}).wait()
    made.move(NOTHING)  # the other rank has not received it
    assert made.connections[1].begun == [("broadcast", 1.0)] and left == []
    made.move(NOTHING)
    assert left == [made.connections[1]]
    assert made.connections[2].begun == [("broadcast", 1.0)]
    made.connections[1].works[0].is_over.set()


def test_what_is_kept_of_a_done_operation_holds_neither_its_work_nor_the_connection() -> None:
    made = Made(True)
    for work in (made.group.collective("broadcast", ([torch.ones(1)],), {}), made.group.send([torch.ones(1)], 1, 0)):
        kept = weakref.ref(made.connections[0].works.pop(0))
        work.wait()
        with made.junction.changed:  # the thread that waited drops its reference under the lock
            assert made.junction.changed.wait_for(lambda: kept() is None, timeout=1) is True, work  # noqa: B023


class NoCards:
    """Transports that choose nothing."""

    def __init__(self) -> None:
        self.choices = 0

    def names_of_cards(self, interfaces: Iterable[str]) -> list[tuple[str, str]]:
        return []

    def choose_anew(self, down: Any) -> None:
        self.choices += 1


class NoDevices:
    ends: frozenset[Any] = frozenset()


def moves_of_two() -> list[Moves]:
    return [Moves(Junction(NoDevices()), NoCards(), rank=rank, world_size=2) for rank in range(2)]


def test_a_move_at_the_end_of_a_run_is_made_by_all_ranks_or_by_none() -> None:
    """Both ranks end their run well, each at its own time; if one rank left out a move, the other one would have
    groups without connections."""
    chance, choices = random.Random(1), []
    for number in range(60):
        store, lost = dist.HashStore(), []
        both = moves_of_two()

        def end(moves: Moves, delay_s: float) -> None:
            threading.Event().wait(delay_s)
            moves.end_run(60.0, well=True)

        both[0].begin(store, "move", "a card", lost.append)
        ends = [threading.Thread(target=end, args=(moves, chance.uniform(0.0, 0.02))) for moves in both]
        for thread in ends:
            thread.start()
        if number % 4:
            both[1].begin(store, "move", "a card", lost.append)
            both[1].settled()
        for thread in ends:
            thread.join(60)
        both[0].settled()
        choices.append(tuple(moves._transports.choices for moves in both))
        assert lost == []
    assert set(choices) == {(0, 0), (1, 1)}


def test_whoever_asks_while_a_move_begins_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks at the moment when the moving thread has been started."""
    moves, goes_on, told = moves_of_two()[0], threading.Event(), []
    start = threading.Thread.start

    def asks(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "holmes-move":
            start(asking)
            asking.join(0.2)

    def move(*_: Any) -> None:
        assert goes_on.wait(60)
        moves._done.append("moved")  # type: ignore[arg-type]

    asking = threading.Thread(target=lambda: told.append(moves.settled()))
    monkeypatch.setattr(moves, "_move", move)
    monkeypatch.setattr(threading.Thread, "start", asks)
    moves.begin(dist.HashStore(), "move", "a card", lambda words: None)
    assert moves.is_moving and told == []
    goes_on.set()
    asking.join(60)
    assert told == [("moved",)] and not moves.is_moving


def test_a_rank_whose_run_has_ended_well_stays_until_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    store = dist.HashStore()
    watches = [failure.FailureWatch(store, rank=rank, world_size=2) for rank in range(2)]
    for watch, moves in zip(watches, moves_of_two(), strict=True):
        watch.move_by(moves)
    first = threading.Thread(target=watches[1].stop)
    first.start()
    first.join(0.2)
    assert first.is_alive()
    watches[0].stop()
    first.join(60)
    assert not first.is_alive()
