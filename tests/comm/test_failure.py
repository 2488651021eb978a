"""What ends a run: each rank says within seconds which rank failed first, and ends."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_ranks import CULPRIT, SIZE
from launch import launch, launch_raw
from lost_connections import CASES, USERS, raise_in

from lightning_holmes.comm import failure, uncaught
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.failure import Failure, FailureWatch
from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import RemoteError

OTHERS = [rank for rank in range(SIZE) if rank != CULPRIT]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "in step 3, F0.1: ZeroDivisionError: division by zero$"),
        ("SIGKILL", r"nothing has been heard of rank 1 on host \S+, in step 3, F0.1, for 3 s: its process has ended$"),
        ("SIGSTOP", r"nothing has been heard of rank 1 on host \S+, in step 3, F0.1, for 6 s: its process is stopped$"),
    ],
)
def test_ranks_that_no_broken_connection_ends_say_who_failed_and_end(how: str, said: str, tmp_path: Path) -> None:
    """They wait outside of torch.distributed, as the host does under NCCL."""
    workers = launch_raw(SIZE, "failing_ranks:fail", how, timeout_s=100, folder=tmp_path)
    for rank in OTHERS:
        assert workers[rank].exit_code == 1, workers[rank]
        line = rf"^\[rank {rank}\] ends, because rank {CULPRIT} failed.*{said}"
        assert re.search(line, workers[rank].output, re.MULTILINE), workers[rank]


def test_a_rank_that_one_call_holds_is_named_and_waited_for(tmp_path: Path) -> None:
    workers = launch_raw(SIZE, "failing_ranks:fail", "holds Python's lock", timeout_s=100, folder=tmp_path)
    assert [worker.exit_code for worker in workers] == [0] * SIZE, workers
    said = "for 6 s: its process is held by one call, or swapped out"
    assert [said in worker.output for worker in workers] == [rank in OTHERS for rank in range(SIZE)], workers


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGKILL", "is gone: .* has ended, or was killed"),
        ("SIGSTOP", "(has not answered for 6 s: .* is stopped|is gone)"),
    ],
)
def test_ranks_that_wait_for_each_other_say_that_the_store_is_lost_and_end(how: str, said: str, tmp_path: Path) -> None:
    workers = launch_raw(SIZE, "failing_ranks:lose_store", how, timeout_s=100, folder=tmp_path)
    for rank in (1, 2):
        assert workers[rank].exit_code == 1, workers[rank]
        line = rf"\[rank {rank}\] ends, because (the job's store at 127.0.0.1:\d+ {said}|rank 0 failed: .* its process has ended)"
        assert re.search(line, workers[rank].output), workers[rank]


def test_a_rank_that_is_in_its_run_when_rank_0_has_ended_well_goes_on() -> None:
    ended = launch(SIZE, "failing_ranks:lose_store", "ends well", timeout_s=100)
    assert ended == ["ended", "went on", "went on"]


@pytest.mark.parametrize(
    ("absent", "said"),
    [(2, "rank 2 has not come to the job's store within the timeout"), (0, "rank 0, which keeps it, has not started")],
)
def test_a_rank_that_never_joins_is_named_by_all_others(absent: int, said: str, tmp_path: Path) -> None:
    workers = launch_raw(2, "failing_ranks:join", absent, timeout_s=100, folder=tmp_path)
    for worker in workers:
        assert worker.exit_code == 1 and f"ConnectionLostError: {'' if absent else 'rank'}" in worker.output, worker
        assert said in worker.output, worker
    if absent:
        assert "[rank 0] has waited for 1 s: rank 2 has not joined" in workers[0].output, workers[0]


# in one process


class KeptStore:
    """The store of a job, in this process. ``answers``: if it is clear, requests do not return."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        assert self.answers.wait(120)
        with self._lock:
            self.values[key] = str(int(self.values.get(key, 0)) + amount)
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._lock:
            return self.values.setdefault(key, value).encode()

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes of ranks that their watches end; no process ends, and ranks are ended soon."""
    codes: list[int] = []
    made: list[FailureWatch] = []
    begin = FailureWatch.__init__

    def noted(self: FailureWatch, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    monkeypatch.setattr(failure, "_TICK_S", 0.01)
    monkeypatch.setattr(failure, "_GRACE_S", 0.01)
    monkeypatch.setattr(failure, "_SHORT_GRACE_S", 0.01)
    monkeypatch.setattr(failure.os, "_exit", codes.append)
    monkeypatch.setattr(FailureWatch, "__init__", noted)
    yield codes
    for watch in made:  # one that goes on would end this process
        watch._end(timeout_s=60)
        assert not watch._thread.is_alive()


def lost_connection() -> RuntimeError:
    with pytest.raises(RuntimeError) as lost:
        raise_in(dist, "Connection closed by peer [127.0.0.1]:4242")
    return lost.value


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("name", [None, "optimizer node 0"])
def test_the_first_failure_is_the_one_that_all_show_and_is_told_once(name: str | None) -> None:
    store, who = KeptStore(), name or "rank 1"
    watches = [FailureWatch(store, rank=rank, world_size=2, num_nodes=int(name is not None)) for rank in range(2)]
    found: dict[int, Failure | None] = {}
    first = threading.Thread(target=lambda: found.update({1: watches[1].report(ValueError("two\nlines"))}))
    first.start()
    explained = watches[0].explain(lost_connection())
    assert isinstance(explained, RemoteError) and f"{who} failed first: ValueError: two\nlines" in str(explained)
    found[0] = watches[0].report(explained)
    first.join(60)
    assert found[0] == found[1] == Failure(1, "ValueError: two\nlines", told_by=1, name=name)
    assert found[0].line("rank 0") == f"[rank 0] ends, because {who} failed: ValueError: two"
    assert watches[0].report(KeyError("again")) == found[0]
    user = ValueError("not a lost connection")
    assert watches[0].explain(user) is user


def test_rank_0_does_not_end_before_a_late_rank_has_read_why_a_node_failed(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class LateReader(KeptStore):
        """Rank 1, which has no watch here, reads the reason when rank 0 and the node have looked for that a few times."""

        looks, ended_before = 0, [-1]

        def add(self, key: str, amount: int) -> int:
            self.looks += key.endswith("seen") and not amount
            if self.looks == 6:
                self.looks, self.ended_before = 7, list(ended)
                super().add(key, 1)
            return super().add(key, amount)

    store = LateReader()
    rank_0, node = (FailureWatch(store, rank=rank, world_size=3, num_nodes=1) for rank in (0, 2))
    for watch in (rank_0, node):
        watch.heartbeat.tick = lambda: None  # type: ignore[method-assign]  # which would find rank 1 silent
    node.report(ValueError("its disk is full"))
    rank_0._thread.join(60)
    assert (store.ended_before, ended) == ([], [1])
    assert "[rank 0] ends, because optimizer node 0 failed: ValueError: its disk" in capsys.readouterr().err


def test_a_process_whose_own_run_has_failed_is_not_ended(ended: list[int]) -> None:
    store = KeptStore()
    watches = [FailureWatch(store, rank=rank, world_size=2, num_nodes=1) for rank in range(2)]
    watches[0].ends_process = False
    watches[1].report(ValueError("on a node"))
    watches[0]._thread.join(60)
    assert watches[0].cause is not None and not ended


@pytest.mark.parametrize("raised", [KeyError("pace"), RuntimeError("out of range"), ConnectionError("a user's")])
def test_an_error_in_the_watch_ends_all_ranks_with_its_own_words(
    raised: Exception, ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = KeptStore()
    watches = [FailureWatch(store, rank=rank, world_size=2) for rank in range(2)]

    def tick() -> None:
        raise raised

    watches[1].heartbeat.tick = tick  # type: ignore[method-assign]
    for watch in watches[::-1]:
        watch._thread.join(60)
    printed = capsys.readouterr().err
    assert ended == [1, 1] and "in tick\n    raise raised" in printed, printed
    assert f"[rank 1] ends, because its watch for failures failed: {one_line(raised)}\n" in printed
    assert f"[rank 0] ends, because rank 1 failed: {one_line(raised)}\n" in printed


def test_an_error_of_the_store_in_the_watch_says_that_the_store_is_gone(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(KeptStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    watch = FailureWatch(Gone(), rank=1, world_size=2)
    watch._thread.join(60)
    printed = capsys.readouterr().err
    assert ended == [1] and "[rank 1] ends, because the job's store is gone" in printed and "Traceback" not in printed


def test_a_lost_card_ends_all_ranks(ended: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    class Lost(CardWatch):
        def lost(self) -> str | None:
            return "the roce card mlx5_0 of host a1 went down"

    store = KeptStore()
    watches = [FailureWatch(store, rank=rank, world_size=2) for rank in range(2)]
    watches[1].cards = Lost({})
    for watch in watches:
        watch._thread.join(60)
    said = (
        "rank 1 failed: ConnectionLostError: the roce card mlx5_0 of host a1 went down. Started again, the run goes on"
    )
    printed = capsys.readouterr().err
    assert ended == [1, 1] and all(f"[rank {rank}] ends, because {said}" in printed for rank in range(2)), printed


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
    monkeypatch.setattr(uncaught, "_LAST_WAIT_S", 0.0)
    uncaught._end_beside_threads()
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    monkeypatch.setattr(uncaught, "_LAST_WAIT_S", 60.0)
    end.set()
    uncaught._end_beside_threads()
    assert codes == ends and (name == "users" or not thread.is_alive())
    thread.join()


def test_no_thread_is_left_in_torchs_code_when_the_others_have_not_left_in_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(failure, "_NOTICE_S", 0.1)
    failure._see_off(dist.HashStore(), "left", 1, threading.Event())
    assert not [thread for thread in threading.enumerate() if thread.name == "holmes-store-request"]


def test_what_torch_raises_when_the_other_end_is_gone_is_a_lost_connection() -> None:
    found = launch(2, "lost_connections:lose")[0]
    assert found == dict.fromkeys(CASES, True)


@pytest.mark.parametrize("name", USERS)
def test_a_users_exception_that_sounds_like_one_is_his_own(name: str) -> None:
    with pytest.raises((RuntimeError, ConnectionError), match="timed out") as raised:
        USERS[name]()
    assert not is_lost(raised.value)


def test_it_is_told_by_the_words_and_the_place_together() -> None:
    for module, said, lost in (
        (dist, "Connection closed by peer", True),
        (dist, "Invalid scalar type", False),
        (torch.nn, "Connection closed by peer", False),
    ):
        with pytest.raises(RuntimeError) as raised:
            raise_in(module, said)
        assert is_lost(raised.value) is lost
    assert not is_lost(RuntimeError("Connection closed by peer"))
