"""Ranks that are late or silent are named with their place; threads of one process stand for ranks, and the test for
their clocks."""

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from test_failure import KeptStore

from lightning_holmes.comm import heartbeat
from lightning_holmes.comm.heartbeat import Heartbeat
from lightning_holmes.comm.job_store import answer_within


class Ranks:
    """Each rank's training thread does something that does not end before the ranks do. ``elsewhere``: the ranks that
    are on other machines."""

    def __init__(
        self, *does: Callable[[threading.Event], None], timeout_s: float = 300.0, elsewhere: tuple[int, ...] = ()
    ) -> None:
        self.store = KeptStore()
        self.beats: dict[int, Heartbeat] = {}
        self.end, self._begun = threading.Event(), threading.Barrier(len(does) + 1)
        self._threads = [
            threading.Thread(target=self._train, args=(*of, len(does), timeout_s)) for of in enumerate(does)
        ]
        for thread in self._threads:
            thread.start()
        self._begun.wait(60)
        for rank in elsewhere:
            self.beats[rank]._machine = f"machine {rank}"

    def _train(self, rank: int, act: Callable[[threading.Event], None], size: int, timeout_s: float) -> None:
        beat = self.beats[rank] = Heartbeat(self.store, "run", rank=rank, world_size=size, timeout_s=timeout_s)
        beat.where = lambda: (f"in step {rank + 10}", True)
        self._begun.wait(60)
        act(self.end)

    def tick(self, ranks: set[int], times: int) -> None:
        for _ in range(times):
            for rank in ranks:
                self.beats[rank].tick()

    def tick_until(self, ranks: set[int], done: Callable[[], bool]) -> None:
        """Tick until ``done``: threads come to their waits in their own time."""
        for _ in range(3000):
            if done():
                return
            self.tick(ranks, 1)
            self.end.wait(0.001)
        raise AssertionError({rank: beat.late for rank, beat in self.beats.items()})

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        for thread in self._threads:
            thread.join(60)


def waits_for_others(end: threading.Event) -> None:
    answer_within(end.wait, timeout_s=60)


def reads_data(end: threading.Event) -> None:
    end.wait()


def computes(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(1000))


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "b1")


def test_a_rank_that_does_not_come_is_named_with_its_place_on_every_rank_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Ranks(waits_for_others, waits_for_others, reads_data) as ranks:
        for rank in range(3):
            ranks.beats[rank]._cpu_s = lambda: 0.0  # type: ignore[method-assign]
        ranks.tick_until({0, 1, 2}, lambda: bool(ranks.beats[0].late and ranks.beats[1].late))
        (late,) = {ranks.beats[rank].late for rank in (0, 1)}
        assert not ranks.beats[2].late and all(beat.lost is None for beat in ranks.beats.values())
    assert late.startswith("rank 2 on host b1, in step 12, does not come: it is in threading.py:")
    assert "test_heartbeat.py" in late and "reads_data" in late and "rank 0" not in late
    assert capfd.readouterr().err.count("has waited for") == 1, "one rank tells it"


def test_where_all_wait_each_says_for_what_and_a_rank_that_computes_waits_for_nobody() -> None:
    with Ranks(waits_for_others, waits_for_others) as ranks:
        for rank in range(2):
            ranks.beats[rank]._cpu_s = lambda: 0.0  # type: ignore[method-assign]
        ranks.tick_until({0, 1}, lambda: bool(ranks.beats[0].late and ranks.beats[1].late))
        assert ranks.beats[0].late.count("waits for others in threading.py") == 2
        assert "job_store.py" in ranks.beats[0].late
    with Ranks(computes, computes) as ranks:
        looked, frames = [], ranks.beats[0]._frames
        ranks.beats[0]._cpu_s = itertools.count().__next__  # type: ignore[method-assign, assignment]
        ranks.beats[0]._frames = lambda: looked.append(1) or frames()  # type: ignore[method-assign, func-returns-value]
        ranks.tick({0, 1}, 30)
        assert not any(beat.late for beat in ranks.beats.values())
        assert len(looked) == 6, "each look at a thread's stack takes time from it"


def test_a_connection_that_failed_tells_who_is_silent_at_once() -> None:
    with Ranks(waits_for_others, reads_data, reads_data, reads_data, elsewhere=(2,)) as ranks:
        ranks.beats[0]._cpu_s = lambda: 0.0  # type: ignore[method-assign]
        ranks.tick_until({0, 1, 2, 3}, lambda: ranks.beats[0]._waited > 3)
        ranks.beats[0].ask(late=False)
        ranks.tick({0, 1, 3}, 5)
        assert ranks.beats[0].answered.is_set() and ranks.beats[0].silent == {2}
        assert ranks.beats[0].late.startswith("nothing is heard of rank 2 on host b1, in step 12, its process is")
        assert all(beat.lost is None for beat in ranks.beats.values())


@pytest.mark.parametrize(
    ("elsewhere", "in_step", "timeout_s", "ends", "said"),
    [
        ((), True, 300.0, False, ""),  # this process lives, and is not stopped
        ((1,), True, 300.0, True, "for 18 s: its process has ended or is stopped, or its host is cut off"),
        ((1,), False, 300.0, False, ""),
        ((1,), False, 25.0, True, "for 25 s: its process has ended or is stopped, or its host is cut off"),
        ((), False, 25.0, True, "for 25 s: its process is held by one call, or swapped out"),
    ],
)
def test_silence_ends_a_run_where_it_can_only_mean_a_loss(
    elsewhere: tuple[int, ...],
    in_step: bool,
    timeout_s: float,
    ends: bool,
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Ranks(reads_data, reads_data, timeout_s=timeout_s, elsewhere=elsewhere) as ranks:
        ranks.beats[1].where = lambda: ("in step 11", in_step)
        ranks.tick({0, 1}, 2)
        ranks.tick({0}, 18)
        assert ranks.beats[0].lost is None
        ranks.tick({0}, 20)
        lost: Any = ranks.beats[0].lost
    assert (lost is not None) == ends, lost
    if ends:
        assert lost == (1, f"nothing has been heard of rank 1 on host b1, in step 11, {said}")
    named = "[rank 0] nothing has been heard of rank 1 on host b1, in step 11, for 18 s"
    assert (named in capfd.readouterr().err) == (not ends or timeout_s < 300)


def test_a_listener_that_is_late_itself_takes_nobody_for_lost_and_one_that_left_is_not_silent() -> None:
    with Ranks(reads_data, reads_data, elsewhere=(1,)) as ranks:
        for _ in range(30):  # the listener hears one beat where the other has said five
            ranks.tick({1}, 5)
            ranks.tick({0}, 1)
        ranks.beats[1].leave()
        ranks.tick({0}, 100)
        assert ranks.beats[0].lost is None
        assert json.loads(ranks.store.get("run/beat/1"))[0] == -1


def test_a_process_of_this_machine_that_has_ended_is_lost_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(reads_data, reads_data) as ranks:
        monkeypatch.setattr(heartbeat.os, "getpid", lambda: 2**22 + 1)  # larger than any number of a process
        ranks.tick({0, 1}, 2)
        ranks.tick({0}, 3)
        assert ranks.beats[0].lost is None
        ranks.tick({0}, 1)
        said = "nothing has been heard of rank 1 on host b1, in step 11, for 3 s: its process has ended"
        assert ranks.beats[0].lost == (1, said)
