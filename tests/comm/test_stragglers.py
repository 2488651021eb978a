"""A rank that has become slow is reported, and none if all have; each look comes a tenth of a second after the
previous one, and is one step."""

import json
from collections.abc import Callable

import pytest
from test_failure import KeptStore

from lightning_holmes.comm import stragglers
from lightning_holmes.comm.stragglers import Stragglers


class Job:
    def __init__(self, size: int, **alike: list[tuple[int, ...]]) -> None:
        self.store, self.now, self.steps = KeptStore(), 0.0, 0
        self.told: list[str] = []
        self.ranks = [Stragglers(self.store, "run", rank=rank, world_size=size) for rank in range(size)]
        self.ranks[0].on_told.append(self.told.append)
        for each in self.ranks:
            each.alike = alike.get("alike", ())
            each.steps = lambda: self.steps

    def train(self, looks: int, waits: Callable[[int, int], bool]) -> None:
        """Report steps of ranks. ``waits(rank, look)``: whether that rank waits at that look."""
        for look in range(looks):
            self.now, self.steps = self.now + 0.1, self.steps + 1
            for rank in reversed(range(len(self.ranks))):
                self.ranks[rank].look(waits=waits(rank, look), now=self.now)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "_WINDOW_S", 6.0)


def test_a_rank_that_computes_longer_than_its_replicas_is_told_once() -> None:
    job = Job(3, alike=[(0, 1, 2)])
    job.train(130, lambda rank, look: rank != 1 and look % 2 == 0)
    (told,) = job.told
    assert told.startswith("rank 1 on host ") and "computes 0.1 s for a step, and its replicas 0.0508 s" in told
    job.train(130, lambda rank, look: look % 2 == 0)
    assert len(job.told) == 1 and job.ranks[0].told == ""


def test_a_stage_that_has_become_slow_is_told_and_one_that_was_planned_longer_is_not() -> None:
    job = Job(2, alike=[(0,), (1,)])
    job.train(130, lambda rank, look: rank == 0 and look % 2 == 0)
    assert job.told == []
    job.train(130, lambda rank, look: rank == 1 and look % 10 > 0)
    (told,) = job.told
    assert told.startswith("rank 0 on host ") and "s at first; the others have not become so slow" in told


def test_fewer_than_fifty_steps_and_no_training_tell_nothing() -> None:
    job = Job(2, alike=[(0, 1)])
    for each in job.ranks:
        each.steps = lambda: None
    job.train(200, lambda rank, look: rank == 0)
    assert job.store.values == {}
    for each in job.ranks:
        each.steps = lambda: job.steps // 10
    job.train(490, lambda rank, look: rank == 0)
    assert job.store.values == {}
    job.train(20, lambda rank, look: rank == 0)
    assert json.loads(job.store.get("run/pace/1"))[1] == pytest.approx(1.0, rel=0.05)
