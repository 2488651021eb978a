"""Optimizer nodes give the numbers of plain Lightning, parameters and optimizer states. Tolerance 1e-5 (fp32), of the largest entry."""

import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same, state_of
from covering import EXHAUSTIVE
from launch import forked_executable, forked_python, free_port, launch, launch_raw
from optimizer_node_cases import (
    CASES,
    OPTIONS,
    REASONS,
    RESUMED,
    Case,
    Data,
    build,
    find_rates,
    groups_after,
    make_trainer,
    run_scaled,
    run_thawing,
    save_on_exception,
    states_in,
    work,
)

from lightning_holmes.checkpoint.folder import FolderReader
from lightning_holmes.checkpoint.manifest import Manifest

Records = dict[str, list[Any]]
FITS_A_LAUNCH = 50
LAUNCH_S = 1200 if EXHAUSTIVE else 240  # in `make exhaustive`, hours of fits run beside other work
pytestmark = pytest.mark.timeout(3 * LAUNCH_S + 60)  # one launch for each number of workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[Any, Any]:
    """Results of plain Lightning in one process: a fit for each optimizer and option, and one of two epochs."""
    found: dict[Any, Any] = {}
    for key in {("adamw", "no option"), *((case.optimizer, case.option) for case in CASES)}:
        module, trainer = build(key[0]), make_trainer(folder, **OPTIONS[key[1]])
        trainer.fit(module, datamodule=Data())
        file = folder / ("plain.ckpt" if key == ("adamw", "no option") else "other.ckpt")
        trainer.save_checkpoint(file)
        found[key] = {
            "weights": state_of(module),
            "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "states": states_in(file),
            "groups": groups_after(trainer),
        }
    module = build()
    make_trainer(folder, 2).fit(module, datamodule=Data())
    return found | {"two epochs": state_of(module)}


@pytest.fixture(scope="module")
def known() -> Records:
    """Records of all fits of the product that have run in this test worker."""
    return {}


def fits(function: str, size: int, cases: list[Case], folder: Path) -> Records:
    """Launch ``function`` on ``size`` workers; return the results of each rank by name."""
    payload = (str(folder), forked_executable(), cases)
    ranks = launch(size, f"{work.__module__}:{function}", payload, timeout_s=LAUNCH_S)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def found(folder: Path, plain: dict[Any, Any]) -> Records:
    """Results of fits with each number of workers, and of the other runs in the same launches."""
    records: Records = {}
    for size in (1, 2, 4):
        cases = [] if EXHAUSTIVE else [case for case in CASES if case.world_size == size]
        records |= fits("work", size, cases, folder)
    return records


def group_of(place: int) -> str:
    """Return the xdist group of a case: the whole product takes hours, so all test workers share its launches."""
    return f"optimizer_nodes{place // FITS_A_LAUNCH}" if EXHAUSTIVE else "optimizer_nodes"


BY_SIZE = sorted(CASES, key=lambda case: case.world_size)


@pytest.mark.parametrize(
    "place",
    [pytest.param(n, id=str(case), marks=pytest.mark.xdist_group(group_of(n))) for n, case in enumerate(BY_SIZE)],
)
def test_a_fit_gives_the_numbers_of_plain_lightning(
    place: int, plain: dict[Any, Any], folder: Path, known: Records, request: pytest.FixtureRequest
) -> None:
    case = BY_SIZE[place]
    if not EXHAUSTIVE:
        known |= request.getfixturevalue("found")
    if str(case) not in known:
        first = place - place % FITS_A_LAUNCH
        beside = [other for other in BY_SIZE[first : first + FITS_A_LAUNCH] if other.world_size == case.world_size]
        known |= fits("run_given", case.world_size, beside, folder)
    expected, ranks = plain[case.optimizer, case.option], known[str(case)]
    for rank in ranks:
        assert_same(rank["weights"], expected["weights"])
        assert rank["groups"] == expected["groups"]
        assert rank["metrics"]["val_loss"] == pytest.approx(expected["metrics"]["val_loss"], rel=1e-5)
    assert_same(ranks[0]["states"], expected["states"])


@pytest.mark.xdist_group("optimizer_nodes")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_before_the_step_and_sums_of_two_workers_are_the_same_bit_for_bit(
    optimizer: str, found: Records
) -> None:
    for eager, deferred, aggregated in found[f"eager and deferred {optimizer}"]:
        assert all(torch.equal(eager[name], deferred[name]) for name in deferred)
        assert all(torch.equal(eager[name], aggregated[name]) for name in eager)


@pytest.mark.xdist_group("optimizer_nodes")
def test_a_search_for_a_learning_rate_leaves_the_module_as_it_was(folder: Path, found: Records) -> None:
    """Lightning takes the losses of the first replica's half of each batch, as with DDP."""
    expected, ranks = find_rates(folder), found["learning rates"]
    assert len(ranks[0]["losses"]) == len(expected["losses"])
    for rank in ranks:
        assert rank["rate"] == expected["rate"]
        assert_same(rank["weights"], expected["weights"])


@pytest.mark.xdist_group("optimizer_nodes")
def test_what_was_frozen_at_first_is_trained(folder: Path, found: Records) -> None:
    for name, expected in run_thawing(folder).items():
        for rank in found["thawed"]:
            assert_same(rank[name], expected)


@pytest.mark.xdist_group("optimizer_nodes")
def test_a_step_whose_gradients_overflow_is_left_out(folder: Path, found: Records) -> None:
    expected = run_scaled(folder)
    assert expected["overflows"]["scale"] < 2.0**40
    for name, fit in found["scaled"][0].items():
        assert fit["scale"] == expected[name]["scale"]
        assert_same(fit["weights"], expected[name]["weights"])


@pytest.mark.xdist_group("optimizer_nodes")
@pytest.mark.parametrize(("source", "target"), [(source, target) for source in RESUMED for target in RESUMED[source]])
def test_a_checkpoint_is_resumed_with_and_without_nodes(
    source: str, target: str, plain: dict[Any, Any], found: Records
) -> None:
    for weights in found[f"{source} to {target}"]:
        assert_same(weights, plain["two epochs"])


@pytest.mark.xdist_group("optimizer_nodes")
def test_a_run_that_fails_is_saved_as_of_its_last_step_or_not_at_all(folder: Path, found: Records) -> None:
    """Nodes update a layer as soon as they have its gradients: if the backward fails, they hold layers of two different steps."""
    saved, expected = found["raises in forward"][0], save_on_exception(folder, "forward")
    assert_same(saved["weights"], expected["weights"])
    assert_same(saved["states"], expected["states"])
    assert expected["later"] and saved["later"]
    refused = found["raises in backward"][0]
    assert refused["weights"] is None and not refused["later"]
    said = [words for words in refused["said"] if "optimizer nodes have updated some layers with this batch's" in words]
    assert ["is not saved" in words for words in said] == [True, True]


@pytest.mark.xdist_group("optimizer_nodes")
@pytest.mark.parametrize("name", ["early", "after"])
def test_a_folder_holds_one_step_from_memory_and_disk(name: str, folder: Path, found: Records) -> None:
    """The folder "folder" is written while training goes on, "disk" is not; the values are equal bit for bit."""
    written = {
        kind: FolderReader(Manifest.load(path), path)
        for kind in ("folder", "disk")
        for path in [folder / f"{kind}-{name}.ckpt"]
    }
    values = {kind: reader.read(dict(reader.manifest.values())) for kind, reader in written.items()}
    assert values["folder"].keys() == values["disk"].keys()
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(values["disk"][n])) for n, v in values["folder"].items())


@pytest.mark.xdist_group("optimizer_nodes")
@pytest.mark.parametrize("source", ["file", "file-after"])
def test_plain_lightning_goes_on_from_a_file(source: str, folder: Path, plain: dict[Any, Any], found: Records) -> None:
    module = build()
    make_trainer(folder, 2).fit(module, datamodule=Data(), ckpt_path=folder / f"{source}.ckpt")
    assert_same(state_of(module), plain["two epochs"])


@pytest.mark.xdist_group("optimizer_nodes")
@pytest.mark.parametrize("why", REASONS)
def test_what_nodes_cannot_do_is_refused(why: str, found: Records) -> None:
    assert REASONS[why] in found[why][0]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("node", "connection lost to optimizer node 0|optimizer node 0 failed: .* its process has ended"),
        ("stopped", r"optimizer node 0 failed: .* nothing has been heard of .* for \d+ s: its process is stopped"),
        ("one of two nodes", "connection lost to optimizer node 0|optimizer node 0 failed: .* its process has ended"),
        ("node by tree", "connection lost to optimizer node 0|optimizer node 0 failed: .* its process has ended"),
        ("worker", "worker 1 is gone|rank 1 failed: .* its process has ended"),
        ("disk", "HolmesError: optimizer node 0, pipeline rank 0: optimizer states cannot be written to"),
    ],
)
def test_whoever_is_lost_is_named(what: str, reason: str, tmp_path: Path) -> None:
    began = time.monotonic()
    workers = launch_raw(
        2,
        f"{work.__module__}:lose",
        (what, str(tmp_path)),
        timeout_s=90,
        folder=tmp_path,
        environment=lambda rank: {"PYTHON_EXEC": forked_executable()},
    )
    if what == "stopped":
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    left = workers[:1] if what == "worker" else workers
    assert all(worker.exit_code not in (0, None) for worker in left)
    assert any(re.search(reason, worker.output) for worker in left), "\n".join(worker.output for worker in left)
    if what != "disk":
        lost = float((tmp_path / "lost").read_text())
        assert all(began + worker.seconds - lost < 30 for worker in left)
    if what == "disk":
        assert torch.load(tmp_path / "before.ckpt", weights_only=False)["global_step"] == 1
        assert not list(tmp_path.glob("states/*")), "what a node leaves behind"


def test_a_node_that_does_not_come_is_named_as_the_reason(tmp_path: Path) -> None:
    """The error names the missing node, not a late rank: the other rank waits for rank 0 no longer than for anything else."""
    strategy = {"optimizer_nodes": 1, "pipeline_parallel_size": 1, "timeout": timedelta(seconds=5)}
    strategy |= {"num_chunks": 4, "schedule": "auto", "gradient_sync": "auto"}
    port = free_port()
    workers = launch_raw(
        2,
        "snapshot_cases:train",
        {"folder": str(tmp_path), "name": "alone", "strategy": strategy},
        timeout_s=90,
        folder=tmp_path,
        environment=lambda rank: {"HOLMES_NODE_SECRET": "known to both", "HOLMES_NODE_PORT": str(port)},
    )
    told = [rank for rank, w in enumerate(workers) if "HolmesError: 0 of 1 optimizer nodes have come" in w.output]
    assert len(told) == 1, [worker.output for worker in workers]  # either rank may be first; the other repeats it
    assert f"the same HolmesError as rank {told[0]}" in workers[1 - told[0]].output
    assert [worker.exit_code for worker in workers] == [1, 1]


def run_beside_a_node(
    folder: Path, worker: list[str], script: list[str], nodes: int = 1, **environment: str
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Run a command beside optimizer nodes that run ``script``; return exit code and output of the command and of the nodes."""
    variables = os.environ | {
        "HOLMES_NODE_SECRET": "known to both",
        "HOLMES_NODE_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]),
    }
    node = [
        *forked_python(),
        "-m",
        "lightning_holmes.cli",
        "optimizer-node",
        "--rdzv-endpoint" if nodes == 1 else "--master-addr",
        "127.0.0.1:29400" if nodes == 1 else "127.0.0.2, 127.0.0.1",  # the node finds the address of rank 0
        "--",
        *script,
    ]
    processes = [
        subprocess.Popen(
            command,
            env=variables | environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in (worker, *[node] * nodes)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    return (codes[0], said[0]), (max(codes[1:], key=abs), "".join(said[1:]))


def test_a_node_is_started_elsewhere_by_the_same_script(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("node_script.py"))
    (code, said), (node_code, served) = run_beside_a_node(tmp_path, [*forked_python(), script, "cpu"], [script, "gpu"])
    assert code == 0 and "RESULT loss=" in said, said
    assert node_code == 0 and served.count("Mine, for 1 worker") == 2 and "RESULT" not in served, served
    assert "rank 0 is looked for at 127.0.0.1" in served and "the job's own port 29400 is not used" in served
