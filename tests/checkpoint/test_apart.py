"""Two clusters without a shared file system: each writes its own folder, all agree on names, and after resuming,
stages on other ranks get missing values over the network."""

import statistics
from pathlib import Path

import pytest
from checkpoint_cases import make_data_file
from launch import launch


def test_clusters_apart_save_in_the_background_and_resume_in_another_layout(tmp_path: Path) -> None:
    data = make_data_file(tmp_path)
    results = launch(4, "checkpoint_cases:run_apart", {"folder": str(tmp_path), "data": str(data)}, timeout_s=270)
    assert len({result["best"] for result in results}) == 1
    for rank, result in enumerate(results):
        assert result["names"] == sorted([*result["kept"], "last.ckpt"])  # old checkpoints are removed on both
        own = ["__0_0.distcp", "__1_0.distcp"] if rank < 2 else ["__2_0.distcp", "__3_0.distcp"]
        assert result["files"] == sorted([*own, "meta.pt", "plan.yaml"])
    whole = {result["whole"][0]: result["whole"][1] for result in results}
    first = int(results[0]["kept"][0].removeprefix("step=").removesuffix(".ckpt")) + 1
    for name in ("resumed", "last"):
        found = {result[name][0]: result[name][1] for result in results}
        assert min(found[0]) == first
        for step in found[0]:
            expected = statistics.fmean(losses[step] for losses in whole.values())
            assert statistics.fmean(losses[step] for losses in found.values()) == pytest.approx(expected, rel=1e-5)
    for result in results:
        assert "__2_0.distcp" in result["lost"] and "written on host" in result["lost"]
