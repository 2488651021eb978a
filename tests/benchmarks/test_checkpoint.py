"""Checkpoints' figures: throughput against torch.save and torch.load, the stall of an asynchronous save, and kills.

A figure is the median over rounds of one launch, in which all ways take turns on the same disk.
"""

import os
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint  # here, and not in each child
from checkpoint_workers import STATE_BYTES, throughput, write_for_ever
from launch import launch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import CheckpointManager, Job
from lightning_holmes.checkpoint.finding import whole_checkpoints

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

SAVING = 0.7
"""Of torch.save's throughput, at least, where both do the same: a new file, on the disk, takes the old one's place.
torch.save over the old file, not waiting for the disk, is printed beside it: a kill then leaves nothing."""
STALL = 0.15
"""Of a synchronous save's time, at most."""
KILLS = 100


def test_throughput_and_stall(tmp_path: Path) -> None:
    """Up to three launches, each a measurement of its own: other work on the machine can spoil one, never better it."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        results = launch(4, f"checkpoint_workers:{throughput.__name__}", str(folder), timeout_s=200)
        shutil.rmtree(folder)
        seconds = {way: statistics.median(times) for way, times in results[0].items()}
        for way, value in seconds.items():
            print(f"{way}: {value:.2f} s, {STATE_BYTES / value / 1e6:.0f} MB/s")
        ratios = {way: value / seconds["save"] for way, value in seconds.items() if way.startswith("plain save")}
        loading = seconds["plain load"] / seconds["load"]
        stall = seconds["stall"] / seconds["save"]
        for way, ratio in ratios.items():
            print(f"saving {ratio:.2f} of the throughput of a {way}")
        print(f"loading {loading:.2f} of torch.load; stall of an asynchronous save {stall:.3f} of a synchronous one")
        saving = ratios["plain save to a new file that takes the old one's place"]
        if saving >= SAVING and stall < STALL:
            return
    raise AssertionError(f"saving {saving:.2f} (at least {SAVING}), stall {stall:.3f} (below {STALL}), thrice")


class Tiny(pl.LightningModule):
    """Has the values that the killed writer saves."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(20):
            self.register_parameter(f"w{i}", torch.nn.Parameter(torch.zeros(4000)))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("first", self.w0[0])


def test_a_hundred_kills(tmp_path: Path) -> None:
    """The writer is forked from this process, and killed at a random moment of a save; then the checkpoint is found by
    ``ckpt_path="last"``, read whole, and the writer goes on from it. Each tenth time a Trainer does it."""
    draw = random.Random(0)
    good, first, stages = 0, 1, []
    started = time.monotonic()
    manager = CheckpointManager(distributed=True, background=False)
    while good < KILLS:
        before = set(tmp_path.glob(".saving-*"))
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(tmp_path, first)
            finally:
                os._exit(1)
        try:
            while not (tmp_path / "last.ckpt").exists():
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.12))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        stages.append(len(set(tmp_path.glob(".saving-*")) - before))
        found = whole_checkpoints({str(tmp_path / "last.ckpt")}, tmp_path)
        assert found == {str(tmp_path / "last.ckpt")}
        loaded = manager.load(Job(), tmp_path / "last.ckpt", weights_only=None)
        number = loaded["global_step"]
        values = loaded["state_dict"].read_many(loaded["state_dict"])
        assert number >= first - 1 and len(values) == 20
        assert all(bool((value == number).all()) for value in values.values())
        if good % 10 == 0:
            assert first_value(tmp_path) == number
        good += 1
        first = number + 1
    print(f"{good} kills, each followed by a good resume, in {time.monotonic() - started:.0f} s; {first} saves")
    print(f"a save was under way at {sum(n > 0 for n in stages)} of them")
    assert sum(n > 0 for n in stages) > KILLS // 2


def first_value(folder: Path) -> float:
    """The first weight as a Trainer finds it by ``ckpt_path="last"``."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HolmesStrategy(save_distributed_checkpoint=True),
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer.validate(Tiny(), torch.ones(1, 1), ckpt_path="last", verbose=False)[0]["first"]
