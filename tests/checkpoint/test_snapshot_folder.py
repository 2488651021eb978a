"""Snapshot folders: their owner, which are removed, what is kept in them together, and where copies are."""

import errno
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_holmes.checkpoint import Job
from lightning_holmes.checkpoint.copies import partner_of
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.manifest import MANIFEST
from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.checkpoint.saving import FolderSave
from lightning_holmes.checkpoint.snapshot_folder import (
    _START,
    SnapshotFolder,
    SnapshotManager,
    _leave_job,
    _locks,
    find_newest,
    job_name,
    jobs_on_host,
    read_name,
    snapshot_name,
)
from lightning_holmes.errors import ConfigurationError

_NAME = f"lightning_holmes-{os.geteuid()}-a"


def save(folder: Path, step: int, name: str = "w") -> None:
    FolderSave(
        target=folder / str(step),
        token=f"{step:08x}",
        file_systems=FileSystems(of_rank=(0,)),
        values={("state_dict", name): torch.full((4,), float(step))},
        order=[name],
        num_optimizers=0,
        rest=b"rest",
        plan="",
    ).run(Meeting(None, 0, 1, "test", timedelta(seconds=5)))


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


def test_folders_are_the_users_alone_and_those_of_ended_jobs_go(tmp_path: Path) -> None:
    lives = SnapshotFolder(tmp_path, f"{_NAME}1", 0)
    ended = SnapshotFolder(tmp_path, f"{_NAME}2", 0)
    recent = SnapshotFolder(tmp_path, f"{_NAME}3", 0)
    for folder in (ended, recent):
        folder.release()
    old = time.time() - 7200.0
    for folder in (lives, ended):
        for path in (folder.path / "began", folder.path / "step", folder.path, folder.path.parent):
            os.utime(path, (old, old))
    own = SnapshotFolder(tmp_path, f"{_NAME}4", 0)
    assert lives.path.exists() and recent.path.exists() and not ended.path.parent.exists()
    assert own.path.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / f"{_NAME}5").mkdir(mode=0o755)
    (tmp_path / f"{_NAME}6").symlink_to(tmp_path)
    for name in (f"{_NAME}5", f"{_NAME}6"):
        with pytest.raises(ConfigurationError, match=r"another user's, or others can write.*snapshot_folder="):
            SnapshotFolder(tmp_path, name, 0)


def test_what_an_attempt_before_has_left_is_told_from_this_ones(tmp_path: Path) -> None:
    ranks = [SnapshotFolder(tmp_path, _NAME, 0) for _ in range(2)]
    ranks[1].note_step(12)
    assert [rank.began for rank in ranks] == [None, None]
    ranks.append(SnapshotFolder(tmp_path, _NAME, 1))
    assert ranks[-1].began is None, "the next fit of the process"
    for rank in ranks:
        rank.release()
    again = [SnapshotFolder(tmp_path, _NAME, 0) for _ in range(2)]
    at = (again[0].path / "began").stat().st_mtime
    assert [(rank.began, rank.reached) for rank in again] == [(at, 12)] * 2
    assert SnapshotFolder(tmp_path, _NAME, 1).began is not None
    assert SnapshotFolder(tmp_path, _NAME, 2).began is None, "to which no attempt has come"


def test_two_jobs_of_one_name_do_not_share_a_folder_and_a_forked_worker_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_holmes.checkpoint.snapshot_folder._ENDING_S", 0.3)
    first = SnapshotFolder(tmp_path, _NAME, 0, "first")
    assert SnapshotFolder(tmp_path, _NAME, 0, "first").began is None, "another rank"
    with pytest.raises(ConfigurationError, match=r"another job of the same name trains on host.*two names"):
        SnapshotFolder(tmp_path, _NAME, 0, "second")
    told, tells = os.pipe()
    worker = os.fork()
    if worker == 0:  # a data worker, whose process outlives the one that is killed
        os.read(told, 1)
        os._exit(0)
    try:
        for lock in list(_locks):
            os.close(lock)
            _locks.discard(lock)
        assert SnapshotFolder(tmp_path, _NAME, 0, "second").began is not None
    finally:
        os.write(tells, b"x")
        os.waitpid(worker, 0)
    assert first.path.is_dir()


def test_what_another_rank_of_the_host_has_removed_already_is_no_failure(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, _NAME, 0)
    save(folder.path, 3)
    folder.clear()
    assert [path for path in folder.path.iterdir() if path.is_dir()] == []
    shutil.rmtree(folder.path.parent)
    folder.clear()


def test_what_a_job_has_goes_when_the_last_of_its_processes_ends_and_all_have_ended_well(tmp_path: Path) -> None:
    """Two processes of a host; the first one ends in the named way, the second one ends well."""

    def left(first: Callable[[], None]) -> tuple[bool, list[str]]:
        """Return whether anything is left, and the noted events."""
        folder = tmp_path / first.__name__
        folder.mkdir()
        children = []
        for end in (first, well):
            ours, theirs = socket.socketpair()
            ours.settimeout(30)
            pid = os.fork()
            if pid == 0:
                _end_as_python_does(folder, end, theirs)
            assert ours.recv(1), "it has begun"
            children.append((pid, ours, theirs))
        for pid, *ends in children:
            ends[0].send(b"x")
            os.waitpid(pid, 0)
            for end_of_pair in ends:
                end_of_pair.close()
        jobs = jobs_on_host(folder)
        return bool(jobs), [event.words.rpartition(": ")[2] for job in jobs for event in job.events]

    def well() -> None:
        pass

    def exits() -> None:
        sys.exit(2)

    def exits_well() -> None:
        sys.exit(0)

    def raises() -> None:
        raise ValueError("later")

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert left(well) == left(exits_well) == (False, [])
    assert left(exits) == (True, ["sys.exit(2)"])
    assert left(raises) == (True, ["later"])
    assert left(killed) == (True, [])
    again = SnapshotFolder(tmp_path / "killed", _NAME, 0, "second")
    assert [path.name for path in again.path.parent.glob("process.*")] == [f"process.{_START}-{os.getpid()}"]


def _end_as_python_does(base: Path, end: Callable[[], None], parent: socket.socket) -> None:
    """In a forked process: end a fit well, run ``end`` as the script would, and then end as the interpreter does."""
    try:
        SnapshotFolder(base, _NAME, 0, "start").remove_at_exit(well=True)
        parent.send(b"x")
        parent.recv(1)
        end()
    except SystemExit:
        pass
    except BaseException as error:
        sys.last_value = error
    _leave_job(base / _NAME)
    os._exit(0)


def test_notes_that_there_is_no_room_for_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SnapshotFolder(tmp_path, _NAME, 0)
    folder.note_checkpoint("first.ckpt", 3)
    with (folder.path / "checkpoints").open("a") as file:
        file.write('["torn.ck')
    assert folder.saved_checkpoints() == {os.path.abspath("first.ckpt"): 3}

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    folder.note_step(4)
    folder.note_whole(3)
    with pytest.warns(UserWarning, match=r"second.ckpt will not be found.*no room"):
        folder.note_checkpoint("second.ckpt", 6)


def test_the_newest_snapshot_is_one_whose_parts_the_hosts_have_together(tmp_path: Path) -> None:
    for step in (3, 6):
        save(tmp_path, step)
    assert find_newest(tmp_path, lambda value: [value]) == (tmp_path / "6", 6)
    part = tmp_path / "6" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    assert find_newest(tmp_path, lambda value: [value]) == (tmp_path / "3", 3)

    def with_another_host(value: list[Any]) -> list[Any]:
        return [value, [(*about, needed, ["__0_0.distcp"]) for *about, needed, _ in value]]

    assert find_newest(tmp_path, with_another_host) == (tmp_path / "6", 6)
    (tmp_path / "3" / MANIFEST).unlink()
    assert find_newest(tmp_path, lambda value: [value]) is None


def test_a_snapshot_beside_optimizer_nodes_counts_where_these_hold_the_rest(tmp_path: Path) -> None:
    names = [snapshot_name(step, commit) for step, commit in ((3, None), (4, ("run", 5)), (5, ("run", 6)))]
    assert [read_name(name) for name in names] == [(3, None), (4, ("run", 5)), (5, ("run", 6))]
    assert read_name("whole") is None and read_name("5+run") is None
    for step, name in enumerate(names, start=3):
        save(tmp_path, step)
        (tmp_path / str(step)).rename(tmp_path / name)

    def found(have_kept: Any = None) -> tuple[str, int] | None:
        newest = find_newest(tmp_path, lambda value: [value], have_kept)
        return None if newest is None else (newest[0].name, newest[1])

    assert found() == ("3", 3)
    assert found(lambda run, version: False) == ("3", 3), "nodes have been started anew"
    assert found(lambda run, version: version == 5) == ("4+run+5", 4), "the last commit did not reach all nodes"
    assert found(lambda run, version: version == 6) == ("5+run+6", 5)


@pytest.mark.parametrize(
    ("systems", "clusters", "partners"),
    [
        ([0, 0], [0, 0], [None, None]),
        ([0, 1], [0, 0], [1, 0]),
        ([0, 0, 1, 1, 2, 2], [0] * 6, [2, 3, 4, 5, 0, 1]),
        ([0, 1, 2, 3], [0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 0, 1], [0, 0, 0, 1], [3, 3, 3, 0]),
    ],
)
def test_copies_are_on_another_host_and_in_another_cluster_where_there_is_one(
    systems: list[int], clusters: list[int], partners: list[int | None]
) -> None:
    assert partner_of(systems, clusters) == partners


def test_a_snapshot_beside_nodes_that_is_of_no_use_is_not_lost(tmp_path: Path) -> None:
    """Otherwise an older checkpoint, from which a run does not resume bit for bit, would be used instead of the
    complete snapshot before it."""
    folder = SnapshotFolder(tmp_path, _NAME, 0)
    manager = SnapshotManager(folder, group=lambda: None, clusters=[0])
    about = {"order": ["w"], "parameters": frozenset({"w"}), "plan": "", "assigned": frozenset(), "background": True}
    for name in (snapshot_name(4, None), snapshot_name(6, ("run", 7))):
        manager.save_folder(Job(), {"state_dict": {"w": torch.zeros(4)}, "global_step": 1}, folder.path / name, **about)
    manager.settle(Job())
    assert (manager.whole, manager.beside_nodes) == (folder.path / "4", folder.path / name)
    folder.release()
    assert SnapshotFolder(tmp_path, _NAME, 0).newest == 4


def test_two_snapshots_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshots of an earlier fit are deleted when the next fit saves its first one."""
    ended, folder = SnapshotFolder(tmp_path, _NAME, 0), SnapshotFolder(tmp_path, _NAME, 1)
    save(ended.path, 3)
    manager = SnapshotManager(folder, group=lambda: None, clusters=[0])
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(64_000_000, 64_000_000))
    about = {"order": ["w"], "parameters": frozenset({"w"}), "plan": "", "assigned": frozenset(), "background": True}
    for number, fits in ((10_000_000, False), (7_000_000, True)):
        checkpoint = {"state_dict": {"w": torch.zeros(number)}, "global_step": 1}
        if fits:
            manager.save_folder(Job(), checkpoint, folder.path / "1", **about)
        else:
            with pytest.raises(ConfigurationError, match=r"take 84 MB, and .* has 64 MB left of 64:.*--shm-size"):
                manager.save_folder(Job(), checkpoint, folder.path / "1", **about)
    manager.settle(Job())
    assert manager.whole == folder.path / "1"
    assert not (ended.path / "3").exists()


class _Usage:
    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free
