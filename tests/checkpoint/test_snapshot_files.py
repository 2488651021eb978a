"""Snapshots on the hosts of a job: which is the newest, where copies are, and whether two fit."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folder_saves import save_folder

from lightning_holmes.checkpoint import Membership
from lightning_holmes.checkpoint.copies import partner_of
from lightning_holmes.checkpoint.job_folder import JobFolder
from lightning_holmes.checkpoint.manifest import MANIFEST
from lightning_holmes.checkpoint.snapshots import SnapshotManager, find_newest
from lightning_holmes.errors import ConfigurationError

_ABOUT = {"order": ["w"], "parameters": frozenset({"w"}), "plan": "", "assigned": frozenset(), "background": True}


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / f"lightning_holmes-{os.geteuid()}-a", "start")


def save(folder: JobFolder, step: int, fit: int = 0) -> Path:
    path = folder.snapshot(fit, step)
    save_folder(path, {("state_dict", "w"): torch.full((4,), float(step))}, token=f"{step:08x}")
    return path


def test_the_newest_snapshot_is_one_whose_parts_the_hosts_have_together(folder: JobFolder) -> None:
    three, six = save(folder, 3), save(folder, 6)
    save(folder, 9, fit=1)
    (folder.path / "0-x").mkdir()

    def alone(value: Any) -> list[Any]:
        return [value]

    def beside_another_host(value: list[Any]) -> list[Any]:
        return [value, [(step, token, needed, ["__0_0.distcp"]) for step, token, needed, _ in value]]

    assert find_newest(folder, 0, alone) == (six, 6)
    part = six / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    assert find_newest(folder, 0, alone) == (three, 3)
    assert find_newest(folder, 0, beside_another_host) == (six, 6)
    (three / MANIFEST).unlink()
    assert find_newest(folder, 0, alone) is None
    part.unlink()

    def where_another_start_has_completed_it(value: list[Any]) -> list[Any]:
        return [value, [(step, "another", needed, needed) for step, _, needed, _ in value]]

    assert find_newest(folder, 0, where_another_start_has_completed_it) == (six, 6)
    assert not six.exists(), "it was not completed on all hosts"


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


def test_two_snapshots_must_fit_and_two_are_kept(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshots of an earlier fit are deleted when the next fit saves its first one."""
    save(folder, 3)
    manager = SnapshotManager(clusters=[0])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=64_000_000, free=64_000_000))

    def save_weights(number: int, step: int) -> None:
        checkpoint = {"state_dict": {"w": torch.zeros(number)}, "global_step": step}
        manager.save_folder(Membership(), checkpoint, folder.snapshot(1, step), **_ABOUT)

    with pytest.raises(ConfigurationError, match=r"take 84 MB, and .* has 64 MB left of 64:.*--shm-size"):
        save_weights(10_000_000, 1)
    for step in (1, 2, 3):
        save_weights(7_000_000 if step == 1 else 4, step)
    manager.settle(Membership())
    assert manager.whole == folder.snapshot(1, 3)
    assert folder.snapshots(0) == {} and sorted(folder.snapshots(1)) == [2, 3]
