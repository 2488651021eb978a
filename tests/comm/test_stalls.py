"""Ranks that keep others waiting are named together with their current operation; threads of one process stand for
ranks."""

import threading
from collections.abc import Callable

import pytest
from test_failure import KeptStore

from lightning_holmes.comm import stalls
from lightning_holmes.comm.answer import answer_within
from lightning_holmes.comm.stalls import Stalls


class Ranks:
    """Each rank's training thread does something that does not end before the ranks do."""

    def __init__(self, *does: Callable[[threading.Event], None]) -> None:
        self.store, self.stalls = KeptStore(), {}
        self.end = threading.Event()
        self._threads = [threading.Thread(target=self._train, args=of) for of in enumerate(does)]
        self._size = len(does)
        for thread in self._threads:
            thread.start()

    def _train(self, rank: int, act: Callable[[threading.Event], None]) -> None:
        self.stalls[rank] = Stalls(self.store, "run", rank=rank, world_size=self._size, timeout_s=0.2)
        self.stalls[rank].place = lambda: f"in step {rank + 10}"
        act(self.end)

    def look_until(self, ranks: set[int], done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if done():
                return
            for rank in ranks & self.stalls.keys():
                self.stalls[rank].look()
            self.end.wait(0.01)
        raise AssertionError({rank: stall.told for rank, stall in self.stalls.items()})

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
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_ANSWER_S", 0.3)
    monkeypatch.setattr("socket.gethostname", lambda: "b1")


def test_a_rank_that_does_not_come_is_named_with_its_place_on_every_rank_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Ranks(waits_for_others, waits_for_others, reads_data) as ranks:
        ranks.look_until({0, 1, 2}, lambda: len(ranks.stalls) == 3 and all(ranks.stalls[r].told for r in (0, 1)))
        (told,) = {ranks.stalls[rank].told for rank in (0, 1)}
        assert not ranks.stalls[2].told
    assert told.startswith("rank 2 on host b1, in step 12, does not come: it is in threading.py:")
    assert "test_stalls.py" in told and "reads_data" in told and "rank 0" not in told
    assert capfd.readouterr().err.count("has waited for") == 1, "one rank has asked"


def test_a_rank_that_is_stopped_is_named_for_not_answering() -> None:
    with Ranks(waits_for_others, waits_for_others, reads_data) as ranks:
        ranks.look_until({0, 1}, lambda: bool(ranks.stalls[0].told and ranks.stalls[1].told))
        assert ranks.stalls[1].told == (
            "rank 2 on host b1 does not answer: it is stopped or swapped out, or its host is cut off"
        )
        assert [ranks.stalls[rank].silent for rank in (0, 1)].count(frozenset({2})) == 1, "who has asked knows"


def test_where_all_wait_each_says_for_what_and_a_rank_that_computes_asks_nobody() -> None:
    with Ranks(waits_for_others, waits_for_others) as ranks:
        ranks.look_until({0, 1}, lambda: len(ranks.stalls) == 2 and all(s.told for s in ranks.stalls.values()))
        assert ranks.stalls[0].told.count("waits for others in threading.py") == 2
        assert "answer.py" in ranks.stalls[0].told
    with Ranks(computes, computes) as ranks:
        looks = [0]
        ranks.look_until({0, 1}, lambda: looks.append(0) or len(looks) > 60)  # type: ignore[func-returns-value]
        assert not any(stall.told for stall in ranks.stalls.values())
        assert not any("asked" in key for key in ranks.store.values)
