"""A session of an optimizer node: sums, updates, states in memory and on disk (equal bit for bit, within the memory limit), refusals."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import selected
from node_driver import OPTIMIZERS, Driver, told_of

from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node import description
from lightning_holmes.optim.node.description import check_plain, find_class
from lightning_holmes.optim.node.disk import Disk
from lightning_holmes.optim.node.link import Action
from lightning_holmes.optim.node.node_options import NodeOptions, parse_bytes

ROOMS = {"the least": 0, "little": 60_000, "some": 300_000, "for all": 100 << 20}
"""Bytes of memory beyond the least; all sections take 900 kB."""
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"is_eager": True},
    "deferred": {},
    "clipped": {"clips": True},
    "two batches": {"num_batches": 2},
    "two batches, eager": {"num_batches": 2, "is_eager": True},
    "two batches, clipped": {"num_batches": 2, "clips": True},
}
CASES = selected([(o, way, room, n) for o in OPTIMIZERS for way in WAYS for room in ROOMS for n in (1, 2, 4)])


def run(
    optimizer: str, way: str, num_workers: int, states: str, room: int | None, sent: torch.dtype = torch.float32
) -> list[Any]:
    told = told_of(optimizer, num_layers=8, shape=(64, 96), states=states, sent_dtype=sent)
    driver = Driver(told, num_workers=num_workers, room=room)
    try:
        driver.run(num_windows=3, **WAYS[way])
        return [driver.read(unit, 4) for unit in driver.units]
    finally:
        driver.close()


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    for (values, states), (others, their_states) in zip(found, expected, strict=True):
        assert torch.equal(values, others) and states.keys() == their_states.keys()
        assert all(torch.equal(state, their_states[key]) for key, state in states.items())


@pytest.mark.parametrize(("optimizer", "way", "room", "num_workers"), CASES)
def test_on_disk_it_is_the_same_bit_for_bit(
    optimizer: str, way: str, room: str, num_workers: int, tmp_path: Path
) -> None:
    expected = run(optimizer, way, num_workers, "memory", None)
    found = run(optimizer, way, num_workers, str(tmp_path), ROOMS[room])
    assert_same_bits(found, expected)
    assert not list(tmp_path.iterdir()), "files of a run"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_masters_on_disk_are_the_same_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    expected = run(optimizer, "eager", 2, "memory", None, torch.bfloat16)
    found = run(optimizer, "eager", 2, str(tmp_path), ROOMS["the least"], torch.bfloat16)
    assert_same_bits(found, expected)
    for values, states in found:
        assert values.dtype == torch.bfloat16
        assert {name for name, key in states if key == "master_weight"} == {name for name, _ in states}


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_loaded_states_are_those_of_the_checkpoint(place: str, tmp_path: Path) -> None:
    told = told_of("adamw", num_layers=2, shape=(64, 96), states="memory" if place == "memory" else str(tmp_path))
    driver = Driver(told, room=None if place == "memory" else ROOMS["the least"])
    driver.run(num_windows=1, is_eager=True)
    _, first = driver.read(0, 2)
    states: dict[str, dict[str, Any]] = {}
    for (name, key), value in first.items():
        states.setdefault(name, {})[key] = value + 1
    driver.first.order(Action.LOAD, unit=0, message=states).wait()
    found = driver.read(0, 2)[1]
    assert first and found.keys() == first.keys()
    assert all(torch.equal(state, first[key] + 1) for key, state in found.items())
    driver.close()


MEASURED = """
import sys
import psutil
import torch
from node_driver import Driver, told_of
told = told_of("adamw", num_layers=24, shape=(1024, 1024), states=sys.argv[1])
driver = Driver(told_of("adamw", num_layers=1, shape=(4, 4), states="memory"), num_workers=2)
driver.run(num_windows=1)                               # what is loaded at its first use
driver.close()
open("/proc/self/clear_refs", "w").write("5")
limit = psutil.Process().memory_info().rss + int(sys.argv[2])
driver = Driver(told, num_workers=2, memory=int(sys.argv[2]))
driver.run(num_windows=2, gradient=torch.ones(1024 * 1025), is_eager=sys.argv[3] == "eager")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("PEAK", int(peak) * 1024, "LIMIT", limit)
driver.close()
"""


@pytest.mark.parametrize("way", ["eager", "deferred"])
def test_memory_stays_under_the_limit(way: str, tmp_path: Path) -> None:
    """300 MB of parameters and states, with 100 MB of gradients, within 188 MB beyond the process's memory, of which the
    workers in this process take 17."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(188 << 20), way],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    found = re.search(r"PEAK (\d+) LIMIT (\d+)", done.stdout)
    assert found is not None, done.stderr
    assert int(found[1]) <= int(found[2])


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    told = told_of("adamw", num_layers=2, shape=(64, 96), states=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"--memory \d+M is not enough.* give it \d+M"):
        Driver(told, memory=96 << 20)
    with pytest.raises(ConfigurationError, match=r"more than its --memory .* on disk"):
        Driver(told | {"states": "memory"}, memory=1000)


def disk(folder: str, size: int) -> Disk:
    return Disk(
        folder,
        {0: {"values": size, "gradient": 1, "states": 1}},
        limit_bytes=1 << 60,
        beside=0,
        scratch=0,
        name="a node",
    )


def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"need 1125899.* GB in .* GB free .* name a folder on a larger disk"):
        disk(str(tmp_path), 1 << 50)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigurationError, match="optimizer states cannot be kept in '/proc/nowhere'"):
        disk("/proc/nowhere", 1)


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_is_read_and_what_the_disk_cannot_give_is_an_error(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    size = 10 << 20
    storage = disk(str(tmp_path), size)
    assert ("page cache dropped" in storage.describe()) or direct
    with storage.borrow(0, "values", fresh=("values",), written=("values",)) as (values,):
        values.copy_(torch.arange(values.numel()) % 251)
    for _ in range(2):
        for entry in list(storage._cache.values()):
            assert not wait(entry.writes).not_done
        storage.rest()
        assert not storage._cache
        with storage.borrow(0, "values") as (values,):
            assert torch.equal(values[:size], (torch.arange(size) % 251).to(torch.uint8))
    storage.rest()
    os.truncate(storage._fd, 4096)
    with (
        pytest.raises(HolmesError, match=r"cannot be read from .*: it ends at .* from its last checkpoint"),
        storage.borrow(0, "values"),
    ):
        pass
    storage.close()


def test_what_a_node_is_told() -> None:
    assert [parse_bytes(text) for text in ("4096", "512M", "1.5G", "2gib")] == [4096, 512 << 20, 3 << 29, 2 << 30]
    with pytest.raises(ConfigurationError, match=r"--memory 'much' is no number of bytes"):
        NodeOptions.given(None, "much")
    options = NodeOptions.given("/disk", None)
    assert options.folder("memory", name="a node") == "/disk" and NodeOptions().folder("memory", name="") is None
    with pytest.raises(ConfigurationError, match=r"--states /disk, and the workers have optimizer_states='/other'"):
        options.folder("/other", name="a node")


# sums


def small(optimizer: str = "sgd") -> dict[str, Any]:
    return told_of(optimizer, num_layers=1, shape=(2, 3), states="memory")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_workers_are_summed_in_the_order_of_their_ranks(order: tuple[int, ...]) -> None:
    """Whoever comes first; what no worker has reached is not stepped, and a step of window 1 drops nothing of window 2."""
    driver = Driver(small(), num_workers=3)
    before, _ = driver.read(0, 1)
    values = [torch.full((8,), v) for v in (1e8, -1e8, 1.0)]  # another order gives 0 or another rounding
    under_way = []
    for worker in order:
        link, flags = driver.links[worker], torch.tensor([1, 0], dtype=torch.uint8)
        under_way += [link.order(Action.GRADIENT, unit=0, number=1)] if worker == 0 else []
        under_way += [link.send(flags), link.send(values[worker])]
    while under_way:
        under_way.pop().wait()
    for worker in range(3):
        driver.commit(worker, 1, [("scale", 0.5)])
    after, _ = driver.read(0, 2)
    expected = values[0] + values[1] + values[2]
    assert torch.equal(after[:6], before[:6] - 0.1 * (0.5 * expected[:6])) and torch.equal(after[6:], before[6:])
    driver.close()


def test_workers_of_clusters_send_shares() -> None:
    driver = Driver(small(), num_workers=4, shares=[(0, 2), (1, 2)] * 2)
    before, _ = driver.read(0, 1)
    with ThreadPoolExecutor(4) as pool:
        for value, worker in zip((1.0, 2.0, 3.0, 4.0), range(4), strict=True):
            pool.submit(driver.push, worker, 0, 1, torch.full((8,), value), last=False)
    for worker in range(4):
        driver.commit(worker, 1)
    after, _ = driver.read(0, 2)
    assert torch.allclose(after, before - 0.1 * torch.tensor([4.0] * 4 + [6.0] * 4))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda worker: driver.fetch(worker, 0, 2), range(4)))
    assert torch.equal(torch.cat(found), torch.cat([after, after]))
    driver.close()


def test_a_node_lets_workers_leave_when_all_have_what_they_fetched() -> None:
    driver = Driver(told_of("adamw", num_layers=1, shape=(2048, 2048), states="memory"), num_workers=2)
    (unit,) = driver.units
    events, named = list[str](), threading.Event()

    def near() -> None:
        driver.fetch(0, unit, 1)
        order = driver.first.order(Action.SETTLE, flag=True)
        named.set()
        driver.first.hear()
        order.wait()
        events.append("the first worker may leave")

    thread = threading.Thread(target=near, daemon=True)
    thread.start()
    assert named.wait(60)
    driver.fetch(1, unit, 1)
    events.append("the second worker has all")
    driver.links[1].order(Action.SETTLE, flag=True).wait()
    driver.links[1].hear()
    thread.join(60)
    assert events == ["the second worker has all", "the first worker may leave"]


def test_a_worker_that_has_reached_nothing_sends_nothing() -> None:
    driver = Driver(small(), num_workers=2)
    before, _ = driver.read(0, 1)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(driver.push, 0, 0, 1, torch.empty(0), last=False, touched=[False, False])
        pool.submit(driver.push, 1, 0, 1, torch.ones(8), last=False)
    for worker in range(2):
        driver.commit(worker, 1)
    assert torch.allclose(driver.read(0, 2)[0], before - 0.1)
    driver.close()


def test_gradients_that_were_not_committed_are_dropped() -> None:
    driver = Driver(small())
    before, _ = driver.read(0, 1)
    driver.push(0, 0, 1, torch.ones(8), last=False)
    driver.push(0, 0, 2, torch.full((8,), 3.0), last=False)
    asked = {"names": ["bias0"], "edits": [("scale", 2.0)]}
    assert driver.ask(Action.NORM, number=2, message=asked) == pytest.approx(2 * 36.0)
    assert driver.ask(Action.FINITE, number=2) is True
    driver.commit(0, 2, [("clamp", 2.0)])
    assert torch.allclose(driver.read(0, 2)[0], before - 0.2)
    driver.close()


@pytest.mark.parametrize(
    ("commits", "reason"),
    [
        ([(1, 0.1), (1, 0.2)], "workers 0 and 1 differ at commit 1"),
        ([(1, float("nan")), (1, float("nan"))], ""),
        ([(1, 0.1), (2, 0.1)], "workers 0 and 1 differ at commit 1 and commit 2"),
    ],
)
def test_workers_that_step_differently_are_refused(commits: list[tuple[int, float]], reason: str) -> None:
    driver = Driver(small(), num_workers=2)
    options = [[dict(group) for group in driver._options] for _ in commits]
    for worker, (window, rate) in enumerate(commits):
        options[worker][0]["lr"] = rate
        driver.commit(worker, window, options=options[worker])
    if not reason:
        driver.close()
        return
    driver._thread.join(30)
    with pytest.raises(ConnectionLostError, match=reason):
        raise driver.error or AssertionError


# descriptions


def test_a_class_that_reads_otherwise_on_the_node_is_refused() -> None:
    told = small()
    told["optimizer"] |= {"source": "another"}
    with pytest.raises(ConfigurationError, match=r"SGD reads otherwise on the optimizer node, in .*sgd.py"):
        Driver(told)


def test_a_class_that_the_script_has_not_imported_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"antigravity.Mine is not known"):
        find_class({"module": "antigravity", "name": "Mine"}, may_import=False)
    with pytest.raises(ConfigurationError, match="is not known"):
        find_class({"module": "os", "name": "system"}, may_import=False)


def test_sessions_that_import_the_module_of_a_class_at_the_same_time_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "import_of_a_test", (reached, goes_on), raising=False)
    (tmp_path / "slow_to_import.py").write_text(
        "import threading, torch\n"
        "reached, goes_on = threading.import_of_a_test\n"
        "reached.set(), goes_on.wait(30)\n"
        "class Mine(torch.optim.SGD):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = {"module": "slow_to_import", "name": "Mine", "source": None}
    monkeypatch.setattr(description, "_source_of", lambda kind: None)
    with ThreadPoolExecutor(2) as sessions:
        first = sessions.submit(find_class, told, may_import=True)
        assert reached.wait(30)
        second = sessions.submit(find_class, told, may_import=True)
        wait([second], timeout=0.2)  # long enough to see an unfinished module
        goes_on.set()
        assert first.result(30) is second.result(30)


def test_why_the_module_of_a_class_cannot_be_imported_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"not_here.Mine is not known .*No module named 'not_here'"):
        find_class({"module": "not_here", "name": "Mine"}, may_import=True)


@pytest.mark.parametrize("value", [object(), {"a": [torch.nn.Identity()]}, lambda: None])
def test_nothing_but_plain_values_is_sent(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"lr.* only plain values are sent to optimizer nodes"):
        check_plain(value, "lr")
    check_plain({"betas": (0.9, 0.99), "maximize": False, "foreach": None}, "options")
    with pytest.raises(ConfigurationError, match="lr is a tensor"):
        check_plain(torch.ones(1), "lr")
