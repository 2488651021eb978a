"""Parameters that are trained later than others: with optimizer nodes and a GradScaler, resumed from a checkpoint, and in a
job that is started again.

Baseline: plain Lightning in one process; for a job that is started again, the same job without faults. Tolerance 1e-5 (fp32
and 16-mixed) of the largest entry; a job that is started again is equal bit for bit.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
from comparing import assert_same
from later_group_cases import RESUMED, SCALED, WHEN, resume_all, run_scaled, save_all, work
from launch import forked_executable, launch, launch_raw

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("later_groups")]
Records = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("later")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """Results of plain Lightning: in 16-mixed precision, and resumed from its own checkpoints."""
    save_all(folder, "plain")
    return {"scaled": run_scaled(folder), "resumed": resume_all(folder, "plain", "plain")}


@pytest.fixture(scope="module")
def found(folder: Path, plain: dict[str, Any]) -> Records:
    """Results of each rank by name, of one worker and of two."""
    of_one, *of_two = (
        rank
        for size in (1, 2)
        for rank in launch(size, f"{work.__module__}:work", (str(folder), forked_executable()), timeout_s=240)
    )
    resumed = {name: [rank[name] for rank in of_two] for name in of_two[0] if name != "scaled"}
    by_ranks = {name: [rank["scaled"][name] for rank in of_two] for name in of_two[0]["scaled"]}
    return resumed | {name: [fit] for name, fit in of_one["scaled"].items()} | by_ranks


@pytest.mark.parametrize("name", SCALED)
def test_what_is_trained_later_in_16_bits_is_stepped_and_left_out_as_by_plain_lightning(
    name: str, plain: dict[str, Any], found: Records
) -> None:
    expected, ranks = plain["scaled"][name], found[name]
    batches = SCALED[name][1]
    assert all(expected["scales"][batch] < 2.0**40 for batch in batches), "these steps are left out"
    assert all(rank["scales"] == expected["scales"] for rank in ranks)
    for rank in ranks:
        assert_same(rank["weights"], expected["weights"])
    assert_same(ranks[0]["states"], expected["states"])


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("source", "target"), [(source, target) for source in RESUMED for target in RESUMED[source]])
def test_a_checkpoint_after_it_is_resumed_as_by_plain_lightning(
    source: str, target: str, when: str, folder: Path, plain: dict[str, Any], found: Records
) -> None:
    if target == "plain" and f"{source} to plain" not in found:
        found[f"{source} to plain"] = [resume_all(folder, source, target)]
    expected, ranks = plain["resumed"][when], found[f"{source} to {target}"]
    for rank in ranks:
        assert_same(rank[when]["weights"], expected["weights"])
    assert_same(ranks[0][when]["states"], expected["states"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "node": {"optimizer_nodes": 1, "pipeline_parallel_size": 1, "num_chunks": 4},
    "disk": {"optimizer_nodes": 1, "pipeline_parallel_size": 1, "num_chunks": 4},
    "shards": {"sharding": "parameters", "num_chunks": 4},
}
MEASURED = {"schedule": "auto", "gradient_sync": "auto"}


@pytest.mark.parametrize(("layout", "later"), [("node", "thawed once"), ("disk", "frozen"), ("shards", "a group")])
def test_a_job_that_is_started_again_goes_on_with_it(
    layout: str, later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job resumes in mid-epoch, so no hook thaws or adds anything again."""
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())
    strategy = LAYOUTS[layout] | MEASURED
    whole = {"folder": str(tmp_path), "name": "whole", "strategy": strategy, "later": later, "clip": 0.05}
    expected = launch(2, "snapshot_cases:train", whole)
    memory = str(tmp_path / "memory")
    on_disk = {"optimizer_states": str(tmp_path / "states")} if layout == "disk" else {}
    options = whole | {"strategy": strategy | {"snapshot_every_n_steps": 6} | on_disk, "snapshots": memory}
    kill = {"kill": {"rank": 1, "step": 10, "memory": memory}}
    for name, more, codes in (("killed", kill, [1, -9]), ("again", {}, [0, 0])):
        place = tmp_path / name
        started = options | {"name": name} | more
        workers = launch_raw(2, "snapshot_cases:train", started, timeout_s=60, folder=place)
        said = "\n".join(worker.output for worker in workers)
        assert [worker.exit_code for worker in workers] == codes, said
    assert "goes on from the snapshot of step 7: " in said, said
    assert [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(2)] == expected
