"""What runs in each process of a job that is killed and started again: a fit in which every random number counts.

    launch_raw(2, "snapshot_cases:train", {"folder": ..., "kill": {"rank": 1, "step": 5}}, ...)

It has dropout, a shuffled loader of Lightning's own making whose samples are changed at random, a scheduler, AdamW, and
validation in mid-epoch: whatever a restart fails to restore shows in the losses.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.comm import failure
from lightning_holmes.data import CountedDataModule
from lightning_holmes.strategy import snapshots

ROWS, FEATURES, STEPS = 48, 16, 14


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows to which random numbers of NumPy and torch are added when they are read."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise
        generator = torch.Generator().manual_seed(5)
        self.rows, self.targets = (torch.randn(ROWS, n, generator=generator) for n in (FEATURES, 1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(FEATURES) + float(np.random.rand())
        return self.rows[index] + self.noise * noise, self.targets[index]


class Counted(CountedDataModule):
    """Unchanged rows, in a loader that counts samples of all replicas."""

    def __init__(self) -> None:
        super().__init__(batch_size=4, seed=1)

    def train_dataloader(self) -> Any:
        return self.make_train_loader(Noisy(0.0))

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(0.0), batch_size=4)


def snapshots_in(memory: str | Path) -> list[Path]:
    """Return the complete snapshots of a job's first fit, the oldest first."""
    return sorted(Path(memory).glob("*/0-[0-9]*"), key=lambda path: int(path.name.removeprefix("0-")))


class Net(LightningModule):
    def __init__(self, kill: dict[str, Any], in_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.in_step = in_step
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        )
        self.head = nn.Linear(FEATURES, 1)
        self.kill = kill

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.in_step()
        if (
            self.kill
            and (self.trainer.strategy.cluster_environment.global_rank(), self.trainer.global_step)
            == (self.kill["rank"], self.kill["step"])
            and batch_idx % self.trainer.accumulate_grad_batches == self.kill.get("batch", 0)
        ):
            self.end_process()
        return nn.functional.mse_loss(self.head(self.layers(batch[0])), batch[1])

    def end_process(self) -> None:
        end = time.monotonic() + 60
        while "memory" in self.kill and len(snapshots_in(self.kill["memory"])) < 2:  # the last is still being written
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, self.kill.get("signal", "SIGKILL")))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]


class Thaws(Callback):
    """Trains a layer from a step on; with ``once``, from a hook at the beginning of the second epoch, which a resumed epoch
    does not call."""

    def __init__(self, *, once: bool) -> None:
        self.once = once

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        module.layers[1].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if self.once and trainer.current_epoch == 1:
            module.layers[1].requires_grad_()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.once:
            module.layers[1].requires_grad_(trainer.global_step >= 4)


class Freezes(Callback):
    """Stops training a layer when the second epoch begins."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.layers[1].requires_grad_(False)


class Adds(Callback):
    """Adds a parameter group when the second epoch begins."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.layers[1].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.layers[1].requires_grad_()
            trainer.optimizers[0].add_param_group({"params": list(module.layers[1].parameters()), "lr": 0.03})


class Unfreezes(BaseFinetuning):
    """Trains first the head, then also the last layer, then all layers."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[3], optimizer, lr=0.03)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer)


LATER: dict[str, Callable[[], Callback]] = {
    "frozen": Freezes,
    "thawed": lambda: Thaws(once=False),
    "thawed once": lambda: Thaws(once=True),
    "a group": Adds,
    "finetuning": Unfreezes,
}
"""By name: the callback that changes what is trained."""


class Losses(Callback):
    """Writes each loss to a file at once, since the process may be killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.path.open("a") as file:
            loss = float(outputs["loss"]).hex()
            print(json.dumps([trainer.global_step, trainer.current_epoch, batch_idx, loss]), file=file)


def train(
    options: dict[str, Any], callbacks: Sequence[Callback] = (), in_step: Callable[[], None] = lambda: None
) -> str:
    """Run one fit on every rank; return the digest of the final weights. ``in_step`` is called in each microbatch."""
    folder, rank = Path(options["folder"]), os.environ["RANK"]
    seed_everything(11, verbose=False)
    given = {"schedule": "1f1b", "num_microbatches": 2, "gradient_sync": "all_reduce"} | options.get("strategy", {})
    if "snapshots" in options:
        snapshots.MEMORY = Path(options["snapshots"])  # instead of the host's /dev/shm
        snapshots.MEMORY.mkdir(parents=True, exist_ok=True)
    workers, steps = options.get("workers", 0), options.get("steps", STEPS)
    checkpoints = options.get("checkpoints")
    kept = [ModelCheckpoint(checkpoints, save_top_k=-1, every_n_train_steps=3)] if checkpoints else []
    later = [LATER[options["later"]]()] if "later" in options else []
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=HolmesStrategy(**given),
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=2,
        limit_val_batches=1,
        logger=False,
        callbacks=[Losses(folder / f"losses.{options['name']}.{rank}"), *kept, *later, *callbacks],
        enable_checkpointing=bool(kept),
        gradient_clip_val=options.get("clip"),
        accumulate_grad_batches=options.get("accumulate", 1),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
    kill = options.get("kill", {})
    if kill and kill.get("signal", "SIGKILL") == "SIGKILL" and os.environ["WORLD_SIZE"] == "2":
        failure._CAUSE_S = failure._NOTICE_S = (
            0.5  # instead of six seconds: the killed rank sends and receives nothing, and the other rank is alone
        )
    module = Net(kill, in_step)
    if options.get("counted"):
        trainer.fit(module, datamodule=Counted())
    else:
        trainer.fit(module, data, DataLoader(Noisy(), batch_size=8))
    if options.get("keep_weights"):
        torch.save(module.state_dict(), folder / f"weights.{options['name']}.{rank}")
    assert trainer.global_step == steps
    if options.get("fails") == int(rank):
        raise RuntimeError("after the fit")
    return digest_of(module)


def digest_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
