"""A save by several ranks: complete on every file system or not done at all; threads stand in for the ranks."""

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_saves import Threads, save_folder
from launch import launch

from lightning_holmes.checkpoint import CheckpointManager, Membership, manager, read_state_dict, saving
from lightning_holmes.checkpoint.converting import open_source, write_file
from lightning_holmes.checkpoint.file_systems import PROBE, _of_host, find_file_systems
from lightning_holmes.checkpoint.folder import FolderReader
from lightning_holmes.checkpoint.manifest import Manifest, missing_files
from lightning_holmes.checkpoint.parts import items_of
from lightning_holmes.checkpoint.staging import Staging, Writer
from lightning_holmes.errors import CheckpointError

RANKS = 4


def save(roots: list[Path], token: str, value: float, *, apart: bool = False) -> list[Any]:
    """Save ``last.ckpt`` from all ranks; with ``apart``, ranks 2 and 3 have their own file system."""

    def run(job: Membership) -> None:
        save_folder(
            roots[job.rank] / "last.ckpt",
            {("state_dict", f"weight{job.rank}"): torch.full((100,), value + job.rank)},
            job=job,
            systems=(0, 0, 1, 1) if apart else (0,) * RANKS,
            order=[f"weight{rank}" for rank in range(RANKS)],
            rest=b"rest" if job.rank == 0 else b"",
            token=token,
        )

    return Threads(RANKS).run(run)


def value_of(folder: Path, rank: int) -> float:
    manifest = Manifest.load(folder)
    entry = manifest.state_dict[f"weight{rank}"]
    return float(FolderReader(manifest, folder).read({("x",): entry})[("x",)][0]) - rank


def test_saved_over_the_one_before_and_nothing_is_left(tmp_path: Path) -> None:
    roots = [tmp_path] * RANKS
    (tmp_path / "last.ckpt").write_bytes(b"a plain file of before")
    for number in (1.0, 2.0):
        assert save(roots, f"t{number}", number) == [None] * RANKS
        assert [value_of(tmp_path / "last.ckpt", rank) for rank in range(RANKS)] == [number] * RANKS
        assert os.listdir(tmp_path) == ["last.ckpt"]


def test_one_rank_that_cannot_write_is_named_everywhere_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path] * RANKS
    save(roots, "good", 1.0)
    write_part = saving.write_part

    def full_disk(path: Path, values: Any) -> Any:
        if path.name == "__2_0.distcp":
            raise OSError(28, "No space left on device")
        return write_part(path, values)

    monkeypatch.setattr(saving, "write_part", full_disk)
    for error in save(roots, "bad", 2.0):
        assert isinstance(error, CheckpointError) and "rank 2" in str(error) and "No space left" in str(error)
    assert value_of(tmp_path / "last.ckpt", 3) == 1.0 and os.listdir(tmp_path) == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Mount a file system of 128 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_a_full_or_read_only_disk_is_named_and_what_was_saved_before_stays(distributed: bool, small_disk: Path) -> None:
    manager, path = CheckpointManager(distributed=distributed, background=False), small_disk / "some.ckpt"

    def save_weights(numel: int) -> None:
        checkpoint: dict[str, Any] = {"state_dict": {"a": torch.ones(100), "b": torch.ones(numel)}}
        if distributed:
            names: dict[str, Any] = {"order": ["a", "b"], "parameters": frozenset("ab")}
            manager.save_folder(
                Membership(), checkpoint, path, **names, plan="", assigned=frozenset(), background=False
            )
        else:
            manager.save_plain(Membership(), checkpoint, path, background=False)

    with pytest.raises(CheckpointError, match="No space left on device; nothing is left of it"):
        save_weights(10**6)
    assert os.listdir(small_disk) == []
    save_weights(4)
    with pytest.raises(CheckpointError, match="No space left on device; the checkpoint before it is still there"):
        save_weights(10**6)
    assert os.listdir(small_disk) == ["some.ckpt"] and len(read_state_dict(path)["b"]) == 4
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*; the checkpoint before it is still there"):
        save_weights(4)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert os.listdir(small_disk) == ["some.ckpt"] and len(read_state_dict(path)["b"]) == 4
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(OSError, match="No space left"):
        write_file(open_source(path), small_disk / "again.ckpt")


def test_each_file_system_has_its_part_and_the_whole_index(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    for root in set(roots):
        root.mkdir()
    assert save(roots, "one", 1.0, apart=True) == [None] * RANKS
    for rank, root in enumerate(roots):
        folder = root / "last.ckpt"
        assert value_of(folder, rank) == 1.0 and missing_files(folder) == []
        with pytest.raises(CheckpointError, match="copy it from"):
            value_of(folder, 3 - rank)


def test_file_systems_are_found_by_trying(tmp_path: Path) -> None:
    found = Threads(RANKS).run(lambda job: find_file_systems(tmp_path / ("a" if job.rank in (0, 3) else "b"), job))
    assert {systems.of_rank for systems in found} == {(0, 1, 1, 0)}
    assert found[0].leaders == (0, 1)
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]


def test_what_a_killed_process_has_left_in_looking_for_file_systems_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as alive:
        dead.wait(10)
        left = [f"{_of_host()}{pid}-ab" for pid in (dead.pid, alive.pid)] + [f"{PROBE}-00000000-{dead.pid}-ab"]
        for name in left:
            (tmp_path / name).touch()
        find_file_systems(tmp_path, Membership())
        assert {path.name for path in tmp_path.iterdir()} == set(left[1:])


def test_looking_for_file_systems_leaves_nothing_where_another_rank_fails(tmp_path: Path) -> None:
    class Lost(Membership):
        def all_gather(self, value: Any) -> list[Any]:
            assert list(tmp_path.iterdir()) != []
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        find_file_systems(tmp_path, Lost(size=2))
    assert list(tmp_path.iterdir()) == []


def test_a_background_write_is_of_the_moment_it_began_and_its_failure_is_kept() -> None:
    staging, writer = Staging(), Writer()
    weight = torch.ones(5)
    ((names, copied),) = staging.copy(items_of({("w",): weight, ("tied",): weight}))
    weight.zero_()
    assert copied.sum() == 5 and names == [("w",), ("tied",)]
    gate, removed = threading.Event(), []

    def fails() -> None:
        gate.wait(10)
        raise CheckpointError("disk full")

    writer.run(fails, background=True)
    writer.afterwards(lambda: removed.append("old"))
    gate.set()
    with pytest.raises(CheckpointError, match="disk full"):
        writer.run(lambda: None, background=True)
    assert removed == []  # the file that a failed write was to replace stays
    gate.clear()
    writer.run(lambda: gate.wait(10) and None, background=True)
    writer.afterwards(lambda: removed.append("old"))
    assert removed == []
    gate.set()
    writer.wait()
    assert removed == ["old"]


@pytest.mark.parametrize("fails", [2, 3], ids=["the next save tells", "the end of fit tells"])
def test_a_failed_write_in_the_background_of_a_fit_is_reported(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three saves; the disk is full at one of them. Training goes on until the error can be raised, and earlier saves
    stay."""
    from checkpoint_cases import SaveAt, fit, make_data_file

    write_part, saves = saving.write_part, []

    def full_disk(path: Path, values: Any) -> Any:
        saves.append(path)
        if len(saves) == fails:
            raise OSError(28, "No space left on device")
        return write_part(path, values)

    monkeypatch.setattr(saving, "write_part", full_disk)
    paths = {step: tmp_path / f"{step}.ckpt" for step in (2, 4, 6)}
    holmes = {"save_distributed_checkpoint": True, "async_checkpoint": True}
    with pytest.raises(CheckpointError, match=r"4\.ckpt.*No space left" if fails == 2 else r"6\.ckpt.*No space left"):
        fit(make_data_file(tmp_path), "alone", callbacks=[SaveAt(paths)], holmes=holmes)
    assert [path for path in paths.values() if path.exists()] == list(paths.values())[: fails - 1]
    assert all(missing_files(path) == [] for path in list(paths.values())[: fails - 1])
    assert len(saves) == fails and not list(tmp_path.glob(".saving-*"))


def save_where_nobody_can(folder: str) -> list[list[str]]:
    """In each of two processes with one stage each: return, by format, the errors of saving to impossible paths, and
    then the result for a valid one."""
    from checkpoint_cases import fit, make_data_file

    results = []
    for distributed in (True, False):
        name = "folder" if distributed else "file"
        root = Path(folder) / name
        root.mkdir(exist_ok=True)
        trainer = fit(
            make_data_file(root), "pp2xdp2", holmes={"save_distributed_checkpoint": distributed}, max_steps=1
        ).trainer
        said = []
        for path in (root / "bytes" / "below_a_file.ckpt", f"{root}/zero\0.ckpt", root / "good.ckpt"):
            try:
                trainer.save_checkpoint(path)
                said.append("saved")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        results.append(said)
    results.append([fail_at_the_end(Path(folder))])
    return results


def fail_at_the_end(folder: Path) -> str:
    """Return the error of a fit whose last write, of one file and in the background, finds rank 0's disk full."""
    from checkpoint_cases import SaveAt, fit, make_data_file

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    manager.save_file = full_disk  # in this process only, which ends with the test
    try:
        holmes = {"save_distributed_checkpoint": False, "async_checkpoint": True}
        fit(make_data_file(folder), "pp2xdp2", callbacks=[SaveAt({6: folder / "last.ckpt"})], holmes=holmes)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_ranks_are_told_where_rank_0_alone_cannot_write(tmp_path: Path) -> None:
    for folder, file, (at_the_end,) in launch(2, "test_saving:save_where_nobody_can", str(tmp_path)):
        assert at_the_end.startswith("CheckpointError") and "last.ckpt" in at_the_end and "by rank 0" in at_the_end
        assert "No space left" in at_the_end
        for below, zero, good in (folder, file):
            assert "CheckpointError" in below and "rank 0" in below and "bytes" in below
            assert "ConfigurationError" in zero and "zero character" in zero
            assert good == "saved"
