"""Signals in mid-batch: all ranks of a pipeline end, or save, together at the next batch; no rank waits forever."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launch import Worker, launch_raw
from quiet import quiet_trainer

from lightning_holmes.checkpoint import CheckpointManager, Membership

ENDLESS = 100_000


def train_until_told(options: dict[str, Any]) -> None:
    """Train in each process; the ranks named in ``options`` send themselves a signal from inside their third batch."""
    import signal

    import torch
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from tanh_net import TanhNet
    from torch import Tensor
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_holmes

    told = getattr(signal, options["signal"])

    class Told(TanhNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and int(os.environ["RANK"]) in options["ranks"]:
                options["ranks"] = []  # once, not in each microbatch
                for _ in range(options.get("times", 1)):
                    os.kill(os.getpid(), told)
            return super().training_step(batch, batch_idx)

        def on_fit_start(self) -> None:
            if options.get("early"):
                os.kill(os.getpid(), told)

    class Losses(Callback):
        found: dict[int, float] = {}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.found = {**self.found, trainer.global_step: float(outputs["loss"])}

    folder, losses = Path(options["folder"]), Losses()
    keep = ModelCheckpoint(folder, filename="told", save_on_exception=True)
    trainer = quiet_trainer(
        lightning_holmes.HolmesStrategy(
            pipeline_parallel_size=2, num_microbatches=2, save_distributed_checkpoint=options["folders"]
        ),
        enable_checkpointing=True,
        devices=2,
        plugins=[SLURMEnvironment()] if "SLURM_PROCID" in os.environ else None,
        max_steps=options["steps"],
        callbacks=[keep, losses],
        default_root_dir=folder,
    )
    x = torch.randn(ENDLESS, 4, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    try:
        trainer.fit(Told(4, 4, 4, 1), DataLoader(TensorDataset(x), batch_size=4))
    finally:
        name = f"{'again' if trainer.ckpt_path else 'first'}{os.environ['RANK']}.json"
        (folder / name).write_text(json.dumps({"step": trainer.global_step, "losses": losses.found}))


def launched(options: dict[str, Any], folder: Path, job: Path, environment: Any = None) -> list[Worker]:
    payload = {"folder": str(folder), "folders": True, "steps": ENDLESS, "signal": "SIGTERM", **options}
    return launch_raw(2, "test_sigterm:train_until_told", payload, timeout_s=90, folder=job, environment=environment)


def run(
    options: dict[str, Any], folder: Path, environment: Any = None, codes: tuple[int, ...] = (0, 0)
) -> list[dict[str, Any]]:
    """Return what each rank has written; all processes must have ended by themselves."""
    before = set(folder.glob("*.json"))
    workers = launched(options, folder, folder / f"job{len(before)}", environment)
    for worker in workers:
        assert worker.exit_code is not None, "still running: " + worker.output[-2000:]
        assert "Traceback" not in worker.output or "SIGTERMException" in worker.output, worker.output[-2000:]
    # SIGTERMException is a SystemExit without a code, as in DDP
    assert tuple(worker.exit_code for worker in workers) == codes, "\n".join(w.output[-2000:] for w in workers)
    return [json.loads(path.read_text()) for path in sorted(set(folder.glob("*.json")) - before)]


def step_of_checkpoint(options: dict[str, Any], folder: Path, **expected: Any) -> int:
    """Return the step at which both ranks ended, which is that of the checkpoint they left."""
    first, last = run(options, folder, **expected)
    manager = CheckpointManager(distributed=options["folders"], background=False)
    saved = manager.load(Membership(), folder / "told.ckpt", weights_only=None)
    assert first["step"] == last["step"] == saved["global_step"] and len(saved["state_dict"]) == 6
    return int(first["step"])


@pytest.mark.parametrize(
    ("ranks", "folders"), [([0], True), ([0, 1], False), ([1], True)], ids=["first rank", "all ranks", "last rank"]
)
def test_sigterm_ends_all_ranks_at_a_batch_boundary_with_a_checkpoint(
    ranks: list[int], folders: bool, tmp_path: Path
) -> None:
    step = step_of_checkpoint({"ranks": ranks, "folders": folders}, tmp_path)
    assert step in (2, 3) if 0 in ranks else step < ENDLESS / 100


def test_slurms_requeue_signal_saves_on_all_ranks_and_the_next_job_goes_on(tmp_path: Path) -> None:
    """The signal reaches all ranks in mid-batch; the job that SLURM starts again resumes from Lightning's hpc checkpoint."""
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)

    def environment(rank: int) -> dict[str, str]:
        slurm = {
            "PROCID": rank,
            "LOCALID": rank,
            "NODEID": 0,
            "NNODES": 1,
            "NTASKS": 2,
            "NTASKS_PER_NODE": 2,
            "JOB_ID": 7,
        }
        named = {"JOB_NAME": "train", "NODELIST": "127.0.0.1"}
        path = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        return path | {f"SLURM_{name}": str(value) for name, value in {**slurm, **named}.items()}

    options = {"ranks": [0, 1], "signal": "SIGUSR1", "steps": 12}
    whole = run(options, tmp_path, environment)
    assert asked.read_text() == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt" / "manifest.json").is_file()
    assert [len(found["losses"]) for found in whole] == [12, 12]
    again = run(options | {"ranks": []}, tmp_path, environment)
    for before, after in zip(whole, again, strict=True):
        assert 8 <= len(after["losses"]) < 11
        assert after["losses"].keys() <= before["losses"].keys() and "12" in after["losses"]
    assert not (tmp_path / "hpc_ckpt_2.ckpt").exists()


def test_ctrl_c_ends_all_ranks_at_a_batch_boundary_with_a_checkpoint(tmp_path: Path) -> None:
    """In a terminal all processes get the signal. Lightning's exit code is 1."""
    assert step_of_checkpoint({"ranks": [0, 1], "signal": "SIGINT", "folders": True}, tmp_path, codes=(1, 1)) == 3


def test_each_rank_says_that_ctrl_c_has_ended_it_before_its_first_batch(tmp_path: Path) -> None:
    """Lightning prints it on rank 0 only."""
    first, last = launched({"signal": "SIGINT", "ranks": [], "early": True}, tmp_path, tmp_path / "job")
    assert first.exit_code == last.exit_code == 1
    assert "Detected KeyboardInterrupt" in first.output and "[rank 1] KeyboardInterrupt" in last.output.splitlines()


def test_the_second_ctrl_c_ends_a_rank_at_once(tmp_path: Path) -> None:
    first, last = launched({"signal": "SIGINT", "ranks": [1], "times": 2}, tmp_path, tmp_path / "job")
    assert last.exit_code == 130 and "ends by the second SIGINT" in last.output
    assert first.exit_code == 1, first.output[-2000:]
