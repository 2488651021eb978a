"""An optimizer node with parameters and states on disk gives the same results as a node with them in memory, bit for
bit, and stays within its memory limit; also disks that are full, or fail."""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import selected
from node_driver import OPTIMIZERS, Driver, told_of

from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.optim.node.buffers import PAGE, Memory
from lightning_holmes.optim.node.disk import StateFile
from lightning_holmes.optim.node.node_options import NodeOptions, parse_bytes
from lightning_holmes.optim.node.store import share_out
from lightning_holmes.optim.node.stored_unit import StoredUnit

OVERHEAD = 100 << 20  # memory of a service besides its buffers, and a margin
ROOMS = {"the least": 350_000, "little": 500_000, "some": 800_000, "for all": 100 << 20}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"is_eager": True},
    "deferred": {},
    "clipped": {"clips": True},
    "two batches": {"num_batches": 2},
    "two batches, eager": {"num_batches": 2, "is_eager": True},
    "two batches, clipped": {"num_batches": 2, "clips": True},
}
CASES = selected(
    [(o, way, room, workers) for o in OPTIMIZERS for way in WAYS for room in ROOMS for workers in (1, 2, 4)]
)


def run(
    optimizer: str, way: str, num_workers: int, states: str, memory: int | None, sent: torch.dtype = torch.float32
) -> list[Any]:
    told = told_of(optimizer, num_layers=8, shape=(64, 96), num_workers=num_workers, states=states, sent_dtype=sent)
    driver = Driver(told, memory=memory)
    try:
        driver.run(num_windows=3, **WAYS[way])
        return [driver.read(unit, 4) for unit in driver.units]
    finally:
        driver.close()


@pytest.mark.parametrize(("optimizer", "way", "room", "num_workers"), CASES)
def test_on_disk_it_is_the_same_bit_for_bit(
    optimizer: str, way: str, room: str, num_workers: int, tmp_path: Path
) -> None:
    expected = run(optimizer, way, num_workers, "memory", None)
    found = run(optimizer, way, num_workers, str(tmp_path), OVERHEAD + ROOMS[room])
    for (values, states), (others, their_states) in zip(found, expected, strict=True):
        assert torch.equal(values, others) and states.keys() == their_states.keys()
        assert all(torch.equal(state, their_states[key]) for key, state in states.items())
    assert not list(tmp_path.iterdir()), "files of an ended run"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_masters_on_disk_are_the_same_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    expected = run(optimizer, "eager", 2, "memory", None, torch.bfloat16)
    found = run(optimizer, "eager", 2, str(tmp_path), OVERHEAD + ROOMS["some"], torch.bfloat16)
    for (values, states), (others, their_states) in zip(found, expected, strict=True):
        assert torch.equal(values, others) and values.dtype == torch.bfloat16
        assert {name for name, key in states if key == "master_weight"} == {name for name, _ in states}
        assert states.keys() == their_states.keys()
        assert all(torch.equal(state, their_states[key]) for key, state in states.items())


def test_gradients_whose_update_is_due_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they read again: their memory is freed by the update. The first update waits here until memory is
    scarce."""
    spill, prepare = StoredUnit.spill, StoredUnit.prepare
    is_tight = threading.Event()
    written = []

    def watched_spill(self: StoredUnit) -> bool:
        written.append(spill(self))
        is_tight.set()
        return written[-1]

    def late_prepare(self: StoredUnit, *, ahead: bool = False) -> bool:
        assert ahead or is_tight.wait(30)
        return not ahead and prepare(self)

    monkeypatch.setattr(StoredUnit, "spill", watched_spill)
    monkeypatch.setattr(StoredUnit, "prepare", late_prepare)
    run("adamw", "eager", 1, str(tmp_path), OVERHEAD + ROOMS["little"])
    assert written and not any(written)


def test_loaded_states_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    told = told_of("adamw", num_layers=2, shape=(64, 96), num_workers=1, states=str(tmp_path))
    driver = Driver(told, memory=OVERHEAD + ROOMS["little"])
    driver.run(num_windows=1, is_eager=True)
    _, first = driver.read(0, 2)
    states: dict[str, dict[str, Any]] = {}
    for (name, key), value in first.items():
        states.setdefault(name, {})[key] = value + 1
    driver.ask(0, {"ask": "load", "unit": 0, "states": states})
    found = driver.read(0, 2)[1]
    assert first and found.keys() == first.keys()
    assert all(torch.equal(state, first[key] + 1) for key, state in found.items())
    driver.close()


class Interrupted:
    """A lock that calls ``act`` before it is acquired for the first time."""

    def __init__(self, lock: Any, act: Callable[[], None]) -> None:
        self._lock, self._act = lock, act

    def __enter__(self) -> Any:
        act, self._act = self._act, lambda: None
        act()
        return self._lock.__enter__()

    def __exit__(self, *exception: object) -> Any:
        return self._lock.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_states_that_are_loaded_while_a_step_is_prepared_are_those_that_it_steps_with(tmp_path: Path) -> None:
    """A worker may have begun its first batch while another one still sends the checkpoint."""
    found = []
    for place, memory in (("memory", None), (str(tmp_path), OVERHEAD + ROOMS["for all"])):
        driver = Driver(told_of("adamw", num_layers=1, shape=(64, 96), num_workers=1, states=place), memory=memory)
        unit = driver.service._units[0]
        shapes = dict(zip(unit.layout.names, unit.layout.shapes, strict=True))
        states = {
            n: {"step": torch.tensor(3.0), "exp_avg": torch.ones(s), "exp_avg_sq": torch.ones(s)}
            for n, s in shapes.items()
        }
        if memory is None:
            unit.load(states)
        else:
            unit._lock = Interrupted(unit._lock, functools.partial(unit.load, states))
            assert unit.prepare(ahead=True)
        driver.run(num_windows=1, is_eager=True, fetches=False)
        found.append(driver.read(0, 2))
        driver.close()
    (expected, their_states), (values, own_states) = found
    assert torch.equal(values, expected)
    assert their_states and own_states.keys() == their_states.keys()
    assert all(torch.equal(own_states[key], state) for key, state in their_states.items())


MEASURED = """
import sys
import torch
from node_driver import Driver, told_of
open("/proc/self/clear_refs", "w").write("5")
driver = Driver(told_of("adamw", num_layers=24, shape=(1024, 1024), num_workers=2, states=sys.argv[1]), memory=int(sys.argv[2]))
driver.run(num_windows=2, gradient=torch.ones(1024 * 1025), is_eager=sys.argv[3] == "eager")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("PEAK", int(peak) * 1024, "LIMIT", driver.service._store.limit_bytes)
driver.close()
"""


@pytest.mark.parametrize("way", ["eager", "deferred"])
def test_memory_stays_under_the_limit(way: str, tmp_path: Path) -> None:
    """300 MB of parameters and states, with 100 MB of gradients, within 188 MB beyond the process's memory."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(188 << 20), way],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    found = re.search(r"PEAK (\d+) LIMIT (\d+)", run.stdout)
    assert found is not None, run.stderr
    assert int(found[1]) <= int(found[2])


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    told = told_of("adamw", num_layers=2, shape=(64, 96), num_workers=1, states=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"--memory \d+M is not enough.* give it \d+M"):
        Driver(told, memory=OVERHEAD)
    with pytest.raises(ConfigurationError, match=r"more than its --memory .* on disk"):
        Driver(told | {"states": "memory"}, memory=1000)


def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"need 1125899.* GB in .* GB free .* name a folder on a larger disk"):
        StateFile(tmp_path / "a.holmes-states", 1 << 50)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigurationError, match="optimizer states cannot be kept in '/proc/nowhere'"):
        StateFile(Path("/proc/nowhere/a.holmes-states"), 1 << 20)


def test_files_of_dead_nodes_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "dead.holmes-states").write_bytes(b"1")
    one = StateFile(tmp_path / "one.holmes-states", PAGE)
    two = StateFile(tmp_path / "two.holmes-states", PAGE)
    one.mark(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "one.holmes-states",
        "one.holmes-states.mark",
        "two.holmes-states",
    ]
    assert (tmp_path / "one.holmes-states.mark").read_text() == '{"commit": 3, "dirty": false}'
    one.close()
    two.close()


def test_what_the_disk_cannot_give_is_an_error(tmp_path: Path) -> None:
    file, memory = StateFile(tmp_path / "a.holmes-states", 4 * PAGE), Memory(4 * PAGE)
    os.truncate(file.path, PAGE)
    with pytest.raises(
        HolmesError, match=r"cannot be read from .*a.holmes-states: it ends at .* from its last checkpoint"
    ):
        file.read(0, memory.take(2 * PAGE)).wait()
    file.close()


def test_a_disk_without_o_direct_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    file, memory = StateFile(tmp_path / "a.holmes-states", 16 << 20), Memory(32 << 20)
    there, back = memory.take(10 << 20), memory.take(10 << 20)
    there.copy_(torch.arange(there.numel()) % 251)
    file.write(PAGE, there).wait()
    file.read(PAGE, back).wait()
    assert not file.is_direct and torch.equal(there, back)
    file.close()


def test_memory_is_shared_out() -> None:
    levels = [[1 * PAGE, 2 * PAGE], [3 * PAGE, 6 * PAGE], [100 * PAGE, 6 * PAGE]]
    assert share_out(3 * PAGE, levels) == levels[0]
    assert share_out(6 * PAGE, levels) == [2 * PAGE, 4 * PAGE]
    assert share_out(9 * PAGE, levels) == levels[1]
    assert share_out(1000 * PAGE, levels) == levels[2]


def test_what_a_node_is_told() -> None:
    assert [parse_bytes(text) for text in ("4096", "512M", "1.5G", "2gib")] == [4096, 512 << 20, 3 << 29, 2 << 30]
    with pytest.raises(ConfigurationError, match=r"--memory 'much' is no number of bytes"):
        NodeOptions.given(None, "much")
    options = NodeOptions.given("/disk", None)
    assert options.folder("memory", name="a node") == "/disk" and NodeOptions().folder("memory", name="") is None
    with pytest.raises(ConfigurationError, match=r"--states /disk, and the workers have optimizer_states='/other'"):
        options.folder("/other", name="a node")


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_workers_that_ask_for_norms_one_after_the_other_scale_gradients_once(states: str, tmp_path: Path) -> None:
    """One worker has unscaled its gradients and asks for the norm before the other one has checked whether they are
    finite."""
    told = told_of(
        "sgd", num_layers=1, shape=(4, 5), num_workers=2, states="memory" if states == "memory" else str(tmp_path)
    )
    driver = Driver(told, memory=None if states == "memory" else OVERHEAD + ROOMS["some"])
    unit = driver.service._units[0]
    for worker in range(2):
        unit.arrive(worker, 1, unit.layout.names, torch.ones(unit.layout.numel), is_last=True)
    names, edits = unit.layout.names, [("scale", 0.5)]
    found = []
    for _ in range(2):
        assert unit.is_finite(1)
        found += [unit.norm_squared(1, names, ()) for _ in range(len(found) == 0)]
        found.append(unit.norm_squared(1, names, edits))
    found.append(unit.norm_squared(1, names, ()))
    assert found == pytest.approx([4.0 * unit.layout.numel, *[unit.layout.numel] * 2, 4.0 * unit.layout.numel])
    driver.close()


def test_a_unit_is_complete_whoever_brings_the_last_gradient() -> None:
    driver = Driver(told_of("sgd", num_layers=1, shape=(4, 5), num_workers=3, states="memory"), memory=None)
    unit = driver.service._units[0]
    for window, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], start=1):
        gradient = torch.ones(unit.layout.numel)
        done = [unit.arrive(w, window, unit.layout.names, gradient.clone(), is_last=True) for w in order]
        assert done == [False, False, True], window
    driver.close()
