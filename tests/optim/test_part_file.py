"""The part of a checkpoint that an optimizer node writes belongs to one commit, whatever changes meanwhile."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from node_driver import Driver, told_of

from lightning_holmes.optim.node.part_file import NEXT_TO, PartFile, Wanted, can_write_beside


@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("sent_dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_of_one_commit(states: str, sent_dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(tmp_path / "states") if states == "disk" else "memory"
    told = told_of("adamw", num_layers=4, shape=(8, 12), num_workers=1, states=folder, sent_dtype=sent_dtype)
    driver = Driver(told, memory=None)
    try:
        driver.run(num_windows=2)
        expected = {i: driver.read(i, 3) for i in driver.units}
        units = {driver.service._units[i]: Wanted(values=u.names, states=u.names) for i, u in driver.units.items()}
        file = PartFile(tmp_path / "part", units)
        for unit in list(units)[::2] if states == "memory" else ():  # steps before the file is written
            unit.arrive(0, 3, unit.layout.names, torch.ones(unit.layout.numel))
            unit.update(3, (), told["optimizer"]["groups"])
            assert unit.version == 4
        written = file.run()
        data = (tmp_path / "part").read_bytes()
        assert written["bytes"] == len(data)
        found: dict[tuple[str, str], Any] = {}
        for name, key, placed in written["entries"]:
            value = torch.load(io.BytesIO(data[placed["offset"] :][: placed["length"]]), weights_only=True)
            found[name, key] = torch.as_tensor(value)
        for i, (values, of_unit) in expected.items():
            views = driver.units[i].views(values)
            assert all(torch.equal(found.pop((name, "")), view) for name, view in views.items())
            assert all(torch.equal(found.pop(place), value) for place, value in of_unit.items())
        assert not found
    finally:
        driver.close()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    told = told_of("sgd", num_layers=2, shape=(4, 4), num_workers=1, states="memory")
    driver = Driver(told, memory=None)
    try:
        driver.run(num_windows=1)
        units = {unit: Wanted(values=unit.layout.names, states=()) for unit in driver.service._units.values()}
        file = PartFile(Path("/dev/full"), units)
        assert "No space left on device" in file.run()["error"]
        driver.read(0, 2)
    finally:
        driver.close()


def test_a_node_that_does_not_see_a_file_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    assert can_write_beside(str(tmp_path), "seen")
    assert (tmp_path / f"seen{NEXT_TO}").exists()
    assert not can_write_beside(str(tmp_path), "other")
    assert not can_write_beside(str(tmp_path / "nowhere"), "seen")
    assert len(list(tmp_path.iterdir())) == 2
