import threading

import pytest

from lightning_holmes.comm import failure


class SilentStore:
    """A store that lets its first look for a failure wait until it is told to answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.thread: threading.Thread | None = None
        """The one that looks."""

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: list[str]) -> bool:
        self.thread = threading.current_thread()
        self.asked.set()
        assert self.answers.wait(120)
        return False


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_SILENCE_S", 0.0)


@pytest.mark.usefixtures("_impatient")
def test_a_run_that_ended_well_leaves_no_thread_in_a_request() -> None:
    store = SilentStore()
    watch = failure.FailureWatch(store, rank=1, world_size=2)
    assert store.asked.wait(60)
    ended = threading.Thread(target=watch.stop)
    ended.start()
    ended.join(0.2)
    assert ended.is_alive()
    store.answers.set()
    ended.join(60)
    assert store.thread is not None and not store.thread.is_alive()


@pytest.mark.usefixtures("_impatient")
def test_a_rank_that_fails_does_not_wait_for_a_silent_store() -> None:
    store = SilentStore()
    watch = failure.FailureWatch(store, rank=1, world_size=2)
    assert store.asked.wait(60)
    ended = threading.Thread(target=watch.report, args=(ValueError("here"),))
    ended.start()
    ended.join(60)
    assert not ended.is_alive() and store.thread is not None and store.thread.is_alive()
    store.answers.set()
