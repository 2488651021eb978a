import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launch import launch, launch_raw
from lost_connections import raise_in

from lightning_holmes.comm import failure, uncaught
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.uncaught import line_of, one_line, show_as
from lightning_holmes.errors import RemoteError


class SilentStore:
    """A store whose first check for a failure blocks until the test lets it answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.thread: threading.Thread | None = None
        """The thread that checks."""

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


class KeptStore:
    """The store of a job, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, 0)) + amount)
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_rank_0_whose_process_holds_the_store_stays_until_all_know_who_failed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_NOTICE_S", 60.0)
    monkeypatch.setattr(failure, "_GRACE_S", 300.0)
    store = KeptStore()
    watches = [failure.FailureWatch(store, rank=rank, world_size=3) for rank in range(2)]
    ended = [threading.Thread(target=w.report, args=(ValueError(f"on rank {r}"),)) for r, w in enumerate(watches)]
    ended[1].start()
    for _ in range(6000):
        if "holmes/run/1/failure" in store.values:
            break
        ended[1].join(0.01)
    ended[0].start()
    for thread in ended:
        thread.join(0.2)
    assert all(thread.is_alive() for thread in ended), "rank 2 has not looked yet"
    last = failure.FailureWatch(store, rank=2, world_size=3)
    for thread in ended:
        thread.join(60)
    assert not any(thread.is_alive() for thread in ended)
    with pytest.raises(RuntimeError) as lost:
        raise_in(dist, "Connection closed by peer [127.0.0.1]:4242")
    explained = last.explain(lost.value)
    assert isinstance(explained, RemoteError) and "rank 1 failed first: ValueError: on rank 1" in str(explained)
    last.stop()


def test_nobody_waits_for_a_rank_that_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_NOTICE_S", 60.0)
    monkeypatch.setattr(failure, "_CAUSE_S", 60.0)
    watch = failure.FailureWatch(KeptStore(), rank=0, world_size=2)
    watch.stalls.silent = frozenset({1})
    with pytest.raises(RuntimeError) as lost:
        raise_in(dist, "Connection closed by peer [127.0.0.1]:4242")
    ended = threading.Thread(target=lambda: watch.report(watch.explain(lost.value)), daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()


def test_a_rank_whose_watch_is_late_tells_and_hears_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 300.0)
    store = KeptStore()
    watches = [failure.FailureWatch(store, rank=rank, world_size=2) for rank in range(2)]
    for watch in watches:
        watch._answered -= 10.0
    watches[1].stalls.silent = watches[0].stalls.silent = frozenset({0, 1})  # nobody waits to be read
    watches[0].report(ValueError("here"))
    with pytest.raises(RuntimeError) as lost:
        raise_in(dist, "Connection closed by peer [127.0.0.1]:4242")
    explained = watches[1].explain(lost.value)
    assert isinstance(explained, RemoteError) and "rank 0 failed first: ValueError: here" in str(explained)
    watches[1].stop()


def test_who_fails_first_is_returned_to_those_that_report_after() -> None:
    store = KeptStore()
    watches = [failure.FailureWatch(store, rank=rank, world_size=1) for rank in range(2)]
    assert watches[1].report(ValueError("two\nlines")) == failure.Failure(1, "ValueError: two\nlines")
    first = watches[0].report(KeyError("later"))
    assert first is not None and first.line(0) == "[rank 0] ends, because rank 1 failed: ValueError: two"


def test_an_exception_with_a_line_is_shown_as_it_and_any_other_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: others.append(value))
    named, wrapped, other = ValueError("named"), KeyError("while it was handled"), ValueError("other")
    wrapped.__context__ = named
    show_as(named, "once")
    show_as(named, "a line")
    for error in (named, wrapped, other):
        sys.excepthook(type(error), error, None)
    assert others == [other] and capsys.readouterr().err == "a line\na line\n"
    assert (line_of(wrapped), line_of(other)) == ("a line", None)
    assert (one_line(ValueError("a\nb")), one_line(ValueError())) == ("ValueError: a", "ValueError")


def test_ranks_that_wait_for_each_other_say_that_the_store_is_gone_and_end(tmp_path: Path) -> None:
    payload = {"ends well": False, "poll_s": 300.0}  # nothing is asked for while it goes
    workers = launch_raw(3, "lost_connections:lose_store", payload, timeout_s=60, folder=tmp_path)
    assert [worker.exit_code for worker in workers] == [-9, 1, 1]
    for rank in (1, 2):
        output = workers[rank].output
        assert f"[rank {rank}] ends, because the job's store at 127.0.0.1:" in output, output
        assert "Exception raised from" not in output and len(output.splitlines()) < 10, output


@pytest.mark.parametrize("raised", [KeyError("pace"), RuntimeError("out of range"), ConnectionError("a user's")])
def test_an_error_in_the_watch_ends_the_rank_with_its_own_words_and_not_with_those_of_a_store_that_is_gone(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_SILENCE_S", 0.01)
    monkeypatch.setattr(failure, "_GRACE_S", 0.5)
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    store = KeptStore()

    def look(**_: Any) -> None:
        raise raised

    watches = [failure.FailureWatch(store, rank=rank, world_size=2) for rank in range(2)]
    watches[1].stragglers.look = look  # type: ignore[method-assign]
    for watch in watches[::-1]:
        watch._thread.join(60)
    printed = capsys.readouterr().err
    assert ended == [1, 1] and "store" not in printed.replace("self._store", ""), printed
    assert f"[rank 1] ends, because its watch for failures failed: {one_line(raised)}\n" in printed
    assert "in look\n    raise raised" in printed
    assert f"[rank 0] ends, because rank 1 failed: {one_line(raised)}\n" in printed


@pytest.mark.parametrize("kind", [dist.DistNetworkError, dist.DistStoreError])
def test_an_error_of_the_store_in_the_watch_says_that_the_store_is_gone(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_GRACE_S", 0.01)
    monkeypatch.setattr(failure.os, "_exit", ended.append)

    class Gone(KeptStore):
        def check(self, keys: list[str]) -> bool:
            raise kind("Connection reset by peer")

    watch = failure.FailureWatch(Gone(), rank=1, world_size=2)
    watch._thread.join(60)
    printed = capsys.readouterr().err
    assert ended == [1] and "[rank 1] ends, because the job's store is gone" in printed and "Traceback" not in printed


def test_an_error_in_the_watch_after_the_run_has_ended_well_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    store = KeptStore()
    watch = failure.FailureWatch(store, rank=1, world_size=2)
    monkeypatch.setattr(watch, "_leave", lambda: {}["left"])
    watch.stop()
    assert not watch._thread.is_alive() and ended == [] and "holmes/run/1/failure" not in store.values
    assert "KeyError: 'left'" in capsys.readouterr().err


def test_a_rank_that_is_in_its_run_when_rank_0_has_ended_well_goes_on() -> None:
    ended = launch(3, "lost_connections:lose_store", {"ends well": True, "poll_s": 0.01})
    assert ended == ["ended", "went on", "went on"]


def test_a_card_that_stays_down_is_told_and_one_that_flaps_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("lightning_holmes.comm.cards.time.monotonic", lambda: clock[0])
    for name, state in (("ib0", "up"), ("ib1", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    cards = CardWatch({"ib0": "the card ib0 went down", "ib1": "never up", "ib2": "not there"}, tmp_path)
    for second in range(30):  # down for four seconds of six
        clock[0] += 1.0
        (tmp_path / "ib0" / "operstate").write_text("up" if second % 6 > 3 else "down")
        assert cards.lost() is None
    (tmp_path / "ib0" / "operstate").write_text("down")
    told = []
    for _ in range(7):
        told.append(cards.lost())
        clock[0] += 1.0
    assert told[:5] == [None] * 5 and told[5] == f"the card ib0 went down ({tmp_path}/ib0/operstate says 'down')"


@pytest.mark.parametrize(("name", "ends"), [("holmes-checkpoint", [1]), ("users", [])])
def test_a_process_that_ends_by_an_exception_does_not_wait_to_be_aborted_by_a_thread_that_waits(
    name: str, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(uncaught.os, "_exit", codes.append)
    monkeypatch.setattr(uncaught.logging, "shutdown", lambda: None)
    monkeypatch.setattr(sys, "last_value", ValueError("here"), raising=False)
    end = threading.Event()
    others = [thread for thread in threading.enumerate() if not thread.name.startswith("holmes")]
    monkeypatch.setattr(threading, "enumerate", lambda: [*others, thread])
    thread = threading.Thread(target=end.wait, name=name, daemon=True)
    thread.start()
    uncaught._end_beside_threads()
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    uncaught._end_beside_threads()
    end.set()
    thread.join()
    assert codes == ends
