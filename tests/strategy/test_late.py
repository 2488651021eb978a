"""A rank that is late in a hook is waited for as long as the timeout allows, wherever others wait for it."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from launch import launch, launch_raw
from strategy_cases import Setting, build, samples

from lightning_holmes.comm import gloo

CONNECT_S, LATE_S = 5.0, 7.0


class Late(pl.Callback):
    """Waits in a hook of the last rank, which holds the last stage of the last replica, after the message that all ranks wait for."""

    def __init__(self, *, stuck: bool = False, signal: int = 0) -> None:
        self.stuck, self.signal = stuck, signal

    def wait(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1 and batch_idx == 1:
            threading.Event().wait() if self.stuck else time.sleep(LATE_S)
        if trainer.global_rank == 0 and batch_idx == 1 and self.signal:
            threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        while not threading.Event().wait(1.0):
            os.kill(os.getpid(), self.signal)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.wait(trainer, batch_idx)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.wait(trainer, batch_idx)


def late(payload: dict[str, Any]) -> tuple[int, float]:
    """Fit with a rank that is later than the connection timeout of process groups, but within the strategy's timeout, in
    training and in validation."""
    gloo._CONNECT = timedelta(seconds=CONNECT_S)
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "gradient_sync": "p2p"}
    setting = Setting(Path(payload["folder"]) / os.environ["RANK"], options, replicas=2)
    trainer = setting.trainer(callbacks=[Late()], max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(build(), setting.loader(samples()), setting.loader(samples()))
    return trainer.global_step, float(trainer.callback_metrics["val_loss"])


def stuck(payload: dict[str, Any]) -> None:
    """Fit with a rank that never leaves its hook; the other one waits for it until the timeout, or is sent signals."""
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "timeout": timedelta(seconds=payload["timeout_s"])}
    setting = Setting(Path(payload["folder"]) / os.environ["RANK"], options)
    setting.trainer(callbacks=[Late(stuck=True, signal=payload.get("signal", 0))]).fit(
        build(), setting.loader(samples())
    )


def interrupted(payload: dict[str, Any]) -> None:
    """Fit with two ranks of three that wait for the third and are sent SIGINT, as by Ctrl-C."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    setting = Setting(Path(payload["folder"]) / os.environ["RANK"], {"pipeline_parallel_size": 3})
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    setting.trainer().fit(build(), setting.loader(samples()))


pytestmark = pytest.mark.xdist_group("strategy_late")


def test_a_rank_that_is_later_than_groups_may_take_to_connect_does_not_end_the_run(tmp_path: Path) -> None:
    ended = launch(4, "test_late:late", {"folder": str(tmp_path)}, timeout_s=150)
    assert [step for step, _ in ended] == [3] * 4
    assert len({loss for _, loss in ended}) == 1


def test_a_rank_that_never_leaves_a_hook_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    payload = {"folder": str(tmp_path), "timeout_s": 5}
    workers = launch_raw(2, "test_late:stuck", payload, timeout_s=120, folder=tmp_path / "job")
    assert [worker.exit_code for worker in workers] == [1, 1], workers
    said = r"ConnectionLostError: connection lost on rank 0 while all ranks read in Late.on_train_batch_start and leave it .*nothing came within the timeout"
    named = (
        r".*Timed out waiting 5000ms.*rank 1 on host \S+, in step 1, does not come: it is in .*test_late.py:\d+ wait"
    )
    assert re.search(said + named, workers[0].output), workers[0].output
    assert "[rank 1] ends, because rank 0 failed in step 1: ConnectionLostError" in workers[1].output, workers[1].output


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_one_that_never_comes_ends_by_a_second_signal(sent: int, tmp_path: Path) -> None:
    payload = {"folder": str(tmp_path), "timeout_s": 600, "signal": int(sent)}
    workers = launch_raw(2, "test_late:stuck", payload, timeout_s=120, folder=tmp_path / "job")
    assert all(worker.exit_code for worker in workers), workers
    assert f"ends by the second {signal.Signals(sent).name}" in workers[0].output, workers[0].output
    assert "[rank 1] ends, because" in workers[1].output, workers[1].output


def test_ranks_that_are_interrupted_while_they_start_end(tmp_path: Path) -> None:
    workers = launch_raw(2, "test_late:interrupted", {"folder": str(tmp_path)}, timeout_s=120, folder=tmp_path / "job")
    assert all(worker.exit_code in (1, 130) for worker in workers), workers
    # the other rank may lose the store of the first one before its own signal comes
    assert any(re.search("KeyboardInterrupt|ends by SIGINT", worker.output) for worker in workers), workers
