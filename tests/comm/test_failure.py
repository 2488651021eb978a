import threading

import pytest

from lightning_holmes.comm import failure


class SilentStore:
    """A store that lets its first look for a failure wait until it is told to answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        assert self.answers.wait(60)
        return False


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_SILENCE_S", 0.0)


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "holmes-failure-watch"}


@pytest.mark.usefixtures("_impatient")
def test_a_run_that_ended_well_leaves_no_thread_in_a_request() -> None:
    before = watching()
    store = SilentStore()
    watch = failure.FailureWatch(store, rank=1, world_size=2)
    assert store.asked.wait(60)
    ended = threading.Thread(target=watch.stop)
    ended.start()
    ended.join(0.2)
    assert ended.is_alive()
    store.answers.set()
    ended.join(60)
    assert watching() == before


@pytest.mark.usefixtures("_impatient")
def test_a_rank_that_fails_does_not_wait_for_a_silent_store() -> None:
    store = SilentStore()
    watch = failure.FailureWatch(store, rank=1, world_size=2)
    assert store.asked.wait(60)
    watch.report(ValueError("here"))
    assert not store.answers.is_set()
    store.answers.set()
