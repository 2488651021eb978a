"""The two versions of the cpu controller's interface, on folders that stand in for a mounted hierarchy."""

from pathlib import Path

import pytest

from testbed.cgroup import CpuGroup, CpuHierarchy, find_cpu_hierarchy
from testbed.errors import TestbedUnavailable


def mounts(folder: Path, *lines: str) -> Path:
    (folder / "mounts").write_text("\n".join(("proc /proc proc rw 0 0", *lines)) + "\n")
    return folder / "mounts"


def test_version_1_is_found_by_its_mount_options(tmp_path: Path) -> None:
    found = find_cpu_hierarchy(
        mounts(
            tmp_path,
            "cgroup /c/cpuset cgroup rw,cpuset 0 0",
            "cgroup /c/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0",
            f"none {tmp_path} cgroup2 rw 0 0",
        )
    )
    assert found == CpuHierarchy(Path("/c/cpu,cpuacct"), 1)


def test_version_2_is_found_where_it_has_the_controller(tmp_path: Path) -> None:
    text = mounts(tmp_path, "cgroup /c/cpuset cgroup rw,cpuset 0 0", f"none {tmp_path} cgroup2 rw 0 0")
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    with pytest.raises(TestbedUnavailable, match="no cgroup with the cpu controller"):
        find_cpu_hierarchy(text)
    (tmp_path / "cgroup.controllers").write_text("memory cpu pids\n")
    assert find_cpu_hierarchy(text) == CpuHierarchy(tmp_path, 2)


def test_version_1_writes_quota_and_period(tmp_path: Path) -> None:
    group = CpuGroup(CpuHierarchy(tmp_path, 1), "holmes-t/h0")
    group.create(share=0.45, period_s=0.02)
    assert (group.path / "cpu.cfs_period_us").read_text() == "20000"
    assert (group.path / "cpu.cfs_quota_us").read_text() == "9000"


def test_version_2_hands_the_controller_down_and_writes_the_limit(tmp_path: Path) -> None:
    group = CpuGroup(CpuHierarchy(tmp_path, 2), "holmes-t/h0")
    group.create(share=1.5, period_s=0.1)
    assert (group.path / "cpu.max").read_text() == "150000 100000"
    assert [(tmp_path / name / "cgroup.subtree_control").read_text() for name in ("", "holmes-t")] == ["+cpu", "+cpu"]
    assert not (group.path / "cgroup.subtree_control").exists(), "a group with processes may not hand it down"


@pytest.mark.parametrize(("version", "name", "weight"), [(1, "cpu.shares", "262144"), (2, "cpu.weight", "10000")])
def test_precedence_is_the_largest_weight(tmp_path: Path, version: int, name: str, weight: str) -> None:
    group = CpuGroup(CpuHierarchy(tmp_path, version), "holmes-t")
    with pytest.raises(TestbedUnavailable, match=f"{name} cannot be written"):
        group.precede()
    group.create()
    group.precede()
    assert (group.path / name).read_text() == weight


def test_a_hierarchy_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("a file where the hierarchy should be")
    with pytest.raises(TestbedUnavailable, match=r"cannot be made.*CONFIG_CFS_BANDWIDTH"):
        CpuGroup(CpuHierarchy(tmp_path / "cpu", 1), "holmes-t").create(share=0.5)
