"""If a writer is killed in the middle of a save, the previous checkpoint stays complete."""

import os
import random
import signal
import time
from pathlib import Path

import lightning
import lightning.pytorch as pl
import pytest
import torch
from covering import EXHAUSTIVE
from folder_saves import save_folder
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import quiet_trainer

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import CheckpointManager, Membership
from lightning_holmes.checkpoint.finding import whole_checkpoints
from lightning_holmes.checkpoint.manager import bytes_of

KILLS = 50 if EXHAUSTIVE else 5
"""The number of kills during a save; other kills are not counted."""


class Tiny(pl.LightningModule):
    """A module with the values that the killed writer saves."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(20):
            self.register_parameter(f"w{i}", torch.nn.Parameter(torch.zeros(4000)))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("first", self.w0[0])


@pytest.mark.timeout(900)
def test_a_checkpoint_survives_kills(tmp_path: Path) -> None:
    """The writer is forked from this process and killed at a random moment of a save; then ``ckpt_path="last"`` finds
    the checkpoint, all of it can be read, and the writer goes on from it. Every tenth time a Trainer reads it."""
    draw = random.Random(0)
    good, first, interrupted = 0, 1, 0
    manager = CheckpointManager(distributed=True, background=False)
    while interrupted < KILLS:
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
        interrupted += len(set(tmp_path.glob(".saving-*")) - before) > 0
        found = whole_checkpoints({str(tmp_path / "last.ckpt")}, tmp_path)
        assert found == {str(tmp_path / "last.ckpt")}
        loaded = manager.load(Membership(), tmp_path / "last.ckpt", weights_only=None)
        number = loaded["global_step"]
        values = loaded["state_dict"].read_many(loaded["state_dict"])
        assert number >= first - 1 and len(values) == 20
        assert all(bool((value == number).all()) for value in values.values())
        if good % 10 == 0:
            assert first_value(tmp_path) == number
        good += 1
        first = number + 1
    print(f"{good} kills, {interrupted} of them in the middle of a save, each followed by a good resume; {first} saves")


def first_value(folder: Path) -> float:
    """Return the first weight, as a Trainer loads it with ``ckpt_path="last"``."""
    trainer = quiet_trainer(
        HolmesStrategy(save_distributed_checkpoint=True),
        enable_checkpointing=True,
        devices=1,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
    )
    return trainer.validate(Tiny(), torch.ones(1, 1), ckpt_path="last", verbose=False)[0]["first"]


def write_for_ever(folder: Path, first: int) -> None:
    """Save ``last.ckpt`` again and again; all values of a save are its number. Runs until it is killed."""
    number = first
    while True:
        save_folder(
            folder / "last.ckpt",
            {("state_dict", f"w{i}"): torch.full((4000,), float(number)) for i in range(20)},
            rest=bytes_of({"global_step": number, "epoch": 0, "pytorch-lightning_version": lightning.__version__}),
            token=f"{number:08x}",
        )
        number += 1
