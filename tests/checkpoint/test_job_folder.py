"""The folder of a job in a host's memory: its name, its owner, who shares it, and when it is removed."""

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_holmes.checkpoint.job_folder import JobFolder, _remove_if_last, job_name
from lightning_holmes.errors import ConfigurationError

_NAME = f"lightning_holmes-{os.geteuid()}-a"


def test_a_jobs_name_is_its_launchers_and_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("lr = 0.1")
    monkeypatch.setattr("sys.argv", [str(script), "--lr=1"])
    named = {"TORCHELASTIC_RUN_ID": "blue"}
    first = job_name(named, "10.0.0.1", 29500)
    assert first == job_name(named, "10.0.0.2", 29501), "torchrun may move rank 0 to another host"
    unnamed = [{"TORCHELASTIC_RUN_ID": "none"}, {}]
    assert len({job_name(v, "10.0.0.1", 29500) for v in unnamed}) == 1
    others = [job_name(v, "10.0.0.1", p) for v in ({}, {"SLURM_JOB_ID": "7"}) for p in (1, 2)]
    assert len({first, *others}) == 4, "a SLURM job keeps its name"
    monkeypatch.setattr("sys.argv", [str(script), "--lr=2"])
    changed = job_name(named, "10.0.0.1", 29500)
    script.write_text("lr = 0.2")
    edited = job_name(named, "10.0.0.1", 29500)
    config = tmp_path / "config.yaml"
    monkeypatch.setattr("sys.argv", [str(script), f"--config={config}"])
    configured = set()
    for text in ("lr: 1", "lr: 2"):
        config.write_text(text)
        configured.add(job_name(named, "10.0.0.1", 29500))
    assert len({first, changed, edited, *configured}) == 5


class _Process:
    """A forked process that runs ``begin``, and later ``end`` and what is registered for the exit."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], None] = lambda: None, exits: Path | None = None):
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(30)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                begin()
                self._theirs.send(b"x")
                self._theirs.recv(1)
                end()
            except SystemExit:
                pass
            except BaseException as error:
                sys.last_value = error
            if exits is not None:
                _remove_if_last(exits, _locks[0])
            os._exit(0)
        assert self._ours.recv(1), "it has begun"

    def end(self, number: int | None = None) -> None:
        if number is None:
            self._ours.send(b"x")
        else:
            os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        self._ours.close()
        self._theirs.close()


_locks: list[int] = []


def _join(path: Path, start: str) -> JobFolder:
    folder = JobFolder(path, start)
    _locks.append(folder._lock)
    return folder


def test_folders_are_the_users_alone_and_those_of_ended_jobs_go(tmp_path: Path) -> None:
    lives = _Process(lambda: _join(tmp_path / f"{_NAME}1", "a"))
    for name in (f"{_NAME}2", f"{_NAME}3"):
        os.close(JobFolder(tmp_path / name, "a")._lock)
    old = time.time() - 7200.0
    for name in (f"{_NAME}1", f"{_NAME}2"):
        for path in (tmp_path / name / "start-a", tmp_path / name):
            os.utime(path, (old, old))
    own = JobFolder(tmp_path / f"{_NAME}4", "a")
    assert {path.name for path in tmp_path.iterdir()} == {f"{_NAME}{number}" for number in (1, 3, 4)}
    assert own.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / f"{_NAME}5").mkdir(mode=0o755)
    (tmp_path / f"{_NAME}6").symlink_to(tmp_path)
    for name in (f"{_NAME}5", f"{_NAME}6"):
        with pytest.raises(ConfigurationError, match="another user's, or others can write"):
            JobFolder(tmp_path / name, "a")
    lives.end()


def test_a_start_knows_that_there_was_another_and_counts_its_fits(tmp_path: Path) -> None:
    path = tmp_path / _NAME
    ranks = [JobFolder(path, "a") for _ in range(2)]
    assert [rank.is_restart for rank in ranks] == [False, False]
    assert [ranks[0].count_fit(), JobFolder(path, "a").count_fit()] == [0, 1]
    for rank in ranks:
        os.close(rank._lock)
    again = JobFolder(path, "b")
    assert again.is_restart and again.count_fit() == 0


@pytest.mark.parametrize("left", ["start-a", "checkpoints", "0-5", ""])
def test_a_start_that_is_killed_between_two_of_its_files_is_in_nobodys_way(left: str, tmp_path: Path) -> None:
    path = tmp_path / _NAME
    path.mkdir(mode=0o700)
    if left:
        (path / left).mkdir() if left == "0-5" else (path / left).touch()
    folder = JobFolder(path, "b")
    assert folder.is_restart == (left == "start-a")
    assert folder.saved_checkpoints(0) == {} and folder.count_fit() == 0


def test_two_jobs_of_one_name_do_not_share_a_folder_and_a_forked_worker_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_holmes.checkpoint.job_folder._ENDING_S", 0.3)
    workers: list[int] = []
    read, write = os.pipe()

    def begin() -> None:
        _join(tmp_path / _NAME, "first")
        worker = os.fork()
        if worker == 0:  # a data worker, which outlives its parent
            time.sleep(60)
            os._exit(0)
        os.write(write, str(worker).encode())

    first = _Process(begin)
    workers.append(int(os.read(read, 20)))
    try:
        fellow = _Process(lambda: _join(tmp_path / _NAME, "first"))
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"another job of the same name trains on host.*two names"):
                JobFolder(tmp_path / _NAME, "second")
        first.end(signal.SIGKILL)
        with pytest.raises(ConfigurationError, match="another job of the same name"):
            JobFolder(tmp_path / _NAME, "second")
        fellow.end()
        assert JobFolder(tmp_path / _NAME, "second").is_restart
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def test_what_a_job_has_goes_when_the_last_of_its_processes_ends_well(tmp_path: Path) -> None:
    """Two processes of a host; the second one to end ends in the named way."""

    def left(last: Callable[[], None]) -> bool:
        path = tmp_path / f"{_NAME}{last.__name__}"
        processes = [_Process(lambda: _join(path, "a"), end, path) for end in (well, last)]
        processes[0].end()
        assert path.exists(), "the other one may still fail"
        processes[1].end()
        return path.exists()

    def well() -> None:
        pass

    def raises() -> None:
        raise ValueError("later")

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert [left(end) for end in (well, raises, killed)] == [False, True, True]


def test_notes_that_there_is_no_room_for_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JobFolder(tmp_path / _NAME, "a")
    folder.note_checkpoint(0, "first.ckpt", 3)
    folder.note_checkpoint(1, "other.ckpt", 4)
    with (folder.path / "checkpoints").open("a") as file:
        file.write('[0, "torn.ck')
    assert folder.saved_checkpoints(0) == {os.path.abspath("first.ckpt"): 3}

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.warns(UserWarning, match=r"second.ckpt will not be found.*no room"):
        folder.note_checkpoint(0, "second.ckpt", 6)
