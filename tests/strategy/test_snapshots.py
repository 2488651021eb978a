"""Jobs that are killed and started again resume from the snapshot that is left and end with the same weights, bit for bit.

Baseline: the same job without faults.
"""

import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folder_saves import save_folder
from launch import Worker, launch_raw
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from snapshot_cases import STEPS, Net, Noisy, snapshots_in
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import Membership
from lightning_holmes.checkpoint.job_folder import JobFolder
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.strategy.snapshots import Snapshots


def job(size: int, folder: Path, name: str, *, codes: set[int] | None = None, **options: Any) -> list[Worker]:
    payload = {"folder": str(folder), "name": name, **options}
    workers = launch_raw(size, "snapshot_cases:train", payload, timeout_s=90, folder=folder / name)
    shown = "\n".join(f"--- {w.exit_code}\n{w.output[-3000:]}" for w in workers)
    assert {w.exit_code for w in workers} == (codes or {0}), shown
    return workers


def weights(size: int, folder: Path, name: str) -> list[str]:
    return [pickle.loads((folder / name / f"result{rank}").read_bytes()) for rank in range(size)]


def losses(folder: Path, name: str, rank: int = 0) -> dict[int, Any]:
    lines = map(json.loads, (folder / f"losses.{name}.{rank}").read_text().splitlines())
    return {step: rest for step, *rest in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(size: int, **strategy: Any) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("whole")
        job(size, folder, "whole", strategy=strategy)
        return folder, weights(size, folder, "whole")

    return run


@pytest.mark.xdist_group("snapshots_whole")
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_job_goes_on_from_its_snapshot_bit_for_bit(size: int, whole: Any, tmp_path: Path) -> None:
    draw = random.Random(size)
    baseline, expected = whole(size, pipeline_parallel_size=2)
    kill = {"rank": draw.randrange(size), "step": draw.randrange(4, STEPS)}
    strategy = {"pipeline_parallel_size": 2, "snapshot_every_n_steps": 3}
    job(
        size,
        tmp_path,
        "killed",
        codes={1, -signal.SIGKILL},
        kill=kill,
        strategy=strategy,
        snapshots=str(tmp_path / "memory"),
    )
    workers = job(size, tmp_path, "again", strategy=strategy, snapshots=str(tmp_path / "memory"))
    assert weights(size, tmp_path, "again") == expected
    before, after, known = (losses(*of) for of in ((tmp_path, "killed"), (tmp_path, "again"), (baseline, "whole")))
    resumed = min(after) - 1
    # the last snapshot may not have been written
    assert max(before) == kill["step"] and resumed % 3 == 1 and kill["step"] - 6 < resumed
    assert {**before, **after} == known and all(before[s] == after[s] for s in before.keys() & after.keys())
    assert f"goes on from the snapshot of step {resumed}: " in workers[0].output


@pytest.mark.xdist_group("snapshots_whole")
@pytest.mark.parametrize("damage", ["cut off", "a bit"])
def test_a_damaged_snapshot_is_not_gone_on_from(damage: str, whole: Any, tmp_path: Path) -> None:
    """A truncated file is noticed before the snapshot is chosen. A flipped bit is noticed when the file is read: that start
    ends with the reason and removes the snapshot, and the next start resumes from the one before."""
    _, expected = whole(2, pipeline_parallel_size=2)
    memory, strategy = tmp_path / "memory", {"pipeline_parallel_size": 2, "snapshot_every_n_steps": 3}
    options = {"strategy": strategy, "snapshots": str(memory)}
    kill = {"rank": 1, "step": 12, "memory": str(memory)}
    job(2, tmp_path, "killed", codes={1, -signal.SIGKILL}, kill=kill, **options)
    *_, older, newest = snapshots_in(memory)
    part = newest / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    if damage == "cut off":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    part.write_bytes(data)
    if damage == "a bit":
        ended = "".join(worker.output for worker in job(2, tmp_path, "ended", codes={1}, **options))
        assert f"{newest} is removed on this host" in ended and not (tmp_path / "losses.ended.0").exists(), ended
    workers = job(2, tmp_path, "again", **options)
    assert f"goes on from the snapshot of step {older.name.removeprefix('0-')}: " in workers[0].output
    assert weights(2, tmp_path, "again") == expected


@pytest.mark.xdist_group("snapshots_whole")
def test_a_host_that_is_told_to_leave_costs_no_step_and_the_others_are_started_again(
    whole: Any, tmp_path: Path
) -> None:
    """One rank gets SIGTERM: it writes a last snapshot, and ranks without the signal exit with a code that torchrun takes for
    a failure. If the script then fails after its fit, the last snapshot is there for the next start."""
    _, expected = whole(2, pipeline_parallel_size=2)
    strategy = {"pipeline_parallel_size": 2, "snapshot_every_n_steps": 100}
    memory, kill = str(tmp_path / "memory"), {"rank": 0, "step": 5, "signal": "SIGTERM"}
    told = job(2, tmp_path, "told", codes={0, 143}, kill=kill, strategy=strategy, snapshots=memory)
    assert [worker.exit_code for worker in told] == [0, 143]
    workers = job(2, tmp_path, "again", codes={0, 1}, fails=1, strategy=strategy, snapshots=memory)
    left = max(losses(tmp_path, "told"))
    assert left == 6, "between two epochs"
    assert min(losses(tmp_path, "again")) == left + 1
    assert f"goes on from the snapshot of step {left}: " in workers[0].output
    workers = job(2, tmp_path, "last", strategy=strategy, snapshots=memory)
    assert f"goes on from the snapshot of step {left}: " in workers[0].output, "rank 1 has failed after its fit"
    assert losses(tmp_path, "last") == losses(tmp_path, "again") and weights(2, tmp_path, "last") == expected
    assert not list(Path(memory).iterdir())


def test_who_is_told_to_leave_between_batches_of_one_step_comes_to_its_end_first(tmp_path: Path) -> None:
    """Three batches make a step; SIGTERM comes in the second batch of the sixth step, which is finished first."""
    strategy = {"pipeline_parallel_size": 2, "snapshot_every_n_steps": 100}
    options: dict[str, Any] = {"strategy": strategy, "snapshots": str(tmp_path / "memory"), "accumulate": 3, "steps": 7}
    kill = {"rank": 0, "step": 5, "batch": 1, "signal": "SIGTERM"}
    job(2, tmp_path, "told", codes={0, 143}, kill=kill, **options)
    workers = job(2, tmp_path, "again", **options)
    assert "goes on from the snapshot of step 6: " in workers[0].output


def test_fewer_replicas_go_on_from_a_checkpoint_with_the_same_batches_where_samples_are_counted(tmp_path: Path) -> None:
    """Two replicas, then one, with the same global batches and dropout; tests/soak does the same from snapshots. Baseline: two
    replicas without faults, weights to 1e-5. An ordinary loader is refused."""
    strategy: dict[str, Any] = {"pipeline_parallel_size": 1, "snapshot_every_n_steps": 100}
    memory = tmp_path / "memory"
    options = {"strategy": strategy, "snapshots": str(memory), "checkpoints": str(tmp_path / "kept")}
    job(2, tmp_path, "whole", counted=True, keep_weights=True, strategy={"pipeline_parallel_size": 1})
    killed = {-signal.SIGKILL, 1}
    job(2, tmp_path, "killed", codes=killed, kill={"rank": 1, "step": 8}, counted=True, **options)
    for path in snapshots_in(memory):
        shutil.rmtree(path)
    (refused,) = job(1, tmp_path, "refused", codes={1}, **options)
    assert re.search(r"taken by 2 replicas, and 1 are left: only data modules that count", refused.output)
    (again,) = job(1, tmp_path, "again", counted=True, keep_weights=True, **options)
    assert re.search(r"goes on from \S+step=6.ckpt, since no snapshot is left", again.output)
    assert "2 replicas took it; 1 go on with batches of 8 in 4 microbatches each" in again.output
    assert min(losses(tmp_path, "again")) == 7
    expected, found = (torch.load(tmp_path / f"weights.{name}.0") for name in ("whole", "again"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_without_a_whole_snapshot_a_job_goes_on_from_its_own_newest_checkpoint_and_from_no_older_one(
    tmp_path: Path,
) -> None:
    """One process. A checkpoint from before the job began does not count as its own; after the job has ended well, no
    snapshots are left."""
    memory, kept = tmp_path / "memory", tmp_path / "lightning_logs"
    strategy = {"snapshot_every_n_steps": 100}
    options = {"strategy": strategy, "snapshots": str(memory), "checkpoints": str(kept)}
    job(1, tmp_path, "before", strategy={}, checkpoints=str(kept))
    assert list(kept.glob("*.ckpt"))
    for path in kept.glob("*.ckpt"):
        os.utime(path, (1000.0, 1000.0))
    job(1, tmp_path, "killed", codes={-signal.SIGKILL}, kill={"rank": 0, "step": 1}, **options)
    for path in snapshots_in(memory):
        shutil.rmtree(path)
    (again,) = job(1, tmp_path, "again", codes={-signal.SIGKILL}, kill={"rank": 0, "step": 8}, **options)
    assert "started again, and begins as at first" in again.output
    for path in snapshots_in(memory):
        shutil.rmtree(path)
    (last,) = job(1, tmp_path, "last", **options)
    assert "step=6-v1.ckpt, since no snapshot is left whole" in last.output
    assert min(losses(tmp_path, "last")) == 7
    assert not list(memory.iterdir())


def test_a_snapshot_that_is_left_of_long_ago_does_not_beat_the_checkpoint_of_a_requeued_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(tmp_path / f"lightning_holmes-{os.geteuid()}-a", "start")
    save_folder(folder.snapshot(0, 3), {("state_dict", "w"): torch.zeros(4)})
    requeued = tmp_path / "hpc_ckpt_1.ckpt"
    requeued.touch()
    later = time.time() + 10.0  # a file system's clock may not tell the two files apart
    os.utime(requeued, (later, later))

    def chosen(ckpt_path: Any = None) -> str:
        given: Any = None, SimpleNamespace(whole=None)
        taken = Snapshots(*given, folder, 0, every=3, device=torch.device("cpu"), member=Membership())
        return Path(taken.choose(lambda path: str(requeued), ckpt_path)).name

    assert chosen() == "0-3"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    assert chosen() == requeued.name, "it was saved on other hosts since"
    assert chosen("mine.ckpt") == "0-3"
    folder.note_checkpoint(0, str(requeued), 3)
    assert chosen() == "0-3", "it is of the same moment"


def test_auto_leaves_a_hundredth_of_the_time_to_pauses_and_a_tenth_to_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("lightning_holmes.strategy.snapshots.time.monotonic", lambda: clock[0])
    progress = SimpleNamespace(current=SimpleNamespace(ready=0), is_last_batch=False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(fit_loop=loop, accumulate_grad_batches=2, callbacks=[], global_step=0)
    pauses = iter([0.5, 0.02])

    def save(path: Path, weights_only: bool) -> None:
        clock[0] += next(pauses)

    trainer.save_checkpoint = save
    manager: Any = SimpleNamespace(is_writing=False, write_s=0.0)
    folder: Any = SimpleNamespace(snapshot=lambda fit, step: Path(f"{fit}-{step}"))
    taken = Snapshots(trainer, manager, folder, 0, every="auto", device=torch.device("cpu"), member=Membership())
    taken.is_active = True
    due: list[float] = []
    for tenth in range(3000):
        clock[0] = 1000.0 + tenth / 10
        trainer.global_step, progress.current.ready = tenth // 2, tenth
        if tenth == 2100:
            manager.write_s = 3.0
        if tenth == 2400:
            manager.is_writing = True
        if taken.is_due:
            due.append(tenth / 10)
            if len(due) < 3:
                taken.take()
            else:
                taken._step, taken._taken_at = trainer.global_step, clock[0]
    gaps = [round(after - before, 1) for before, after in itertools.pairwise(due)]
    assert due[0] == 0.2, "after the first step, when no gradients wait for more"
    assert gaps[0] == pytest.approx(50.6, abs=0.3) and gaps[1] == pytest.approx(2.2, abs=0.3)
    assert due[-1] < 240.0 and gaps[-1] == pytest.approx(30.0, abs=0.3), "no two are written at once"


def test_a_search_in_the_fit_is_refused_beside_snapshots() -> None:
    """The search restores the fit to its beginning, which is not the step of the snapshot."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        callbacks=[LearningRateFinder()],
        strategy=HolmesStrategy(snapshot_every_n_steps=1),
    )
    with pytest.raises(ConfigurationError, match="snapshot_every_n_steps beside LearningRateFinder"):
        trainer.fit(Net({}), DataLoader(Noisy(), batch_size=8))
