"""The worker that runs on both hosts of a testbed of which one becomes slow: a fit of twelve layers in two stages
that takes snapshots, ends by SIGTERM, and resumes when it is restarted.

END=20 python slow_host_worker.py FOLDER            # ends after this many steps of this start

Prints a line per step, and writes ``losses.RANK.ATTEMPT``, a line with the step and its loss per step, and
``plan.RANK.ATTEMPT``.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fault_worker import memory_of_this_host
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_worker import join_as_torchrun_would

from lightning_holmes import HolmesStrategy
from lightning_holmes.strategy import snapshots

LAYERS, FEATURES, ROWS, KINDS = 12, 384, 64, 16


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A practically endless data set of ROWS * KINDS different rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(ROWS * KINDS, FEATURES, generator=generator)
        self.targets = torch.randn(ROWS * KINDS, 1, generator=generator)

    def __len__(self) -> int:
        return ROWS * 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.targets[index % len(self.inputs)]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Stack(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden, target = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.mse_loss(self.head(hidden), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=ROWS)


class Progress(Callback):
    """Prints the steps, records their losses, and on rank 0 sends its own process SIGTERM at the end."""

    def __init__(self, folder: Path | None = None, attempt: str = "0", end: str = "") -> None:
        self.folder, self.attempt, self.end = folder, attempt, end
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])
        if self.folder is None:
            return
        place = f"{trainer.global_rank}.{self.attempt}"
        strategy: Any = trainer.strategy
        if len(self.losses) == 1:
            plan = strategy.plan
            found = {"layers": plan.partition.layer_counts, "notes": plan.notes, "grid": plan.placement.grid}
            (self.folder / f"plan.{place}").write_text(json.dumps(found))
        print(f"step {len(self.losses)} of this start done at {time.monotonic():.3f} s", flush=True)
        with (self.folder / f"losses.{place}").open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss']:.9g}\n")
        if trainer.global_rank == 0 and len(self.losses) == int(self.end):
            os.kill(os.getpid(), signal.SIGTERM)


def train(progress: Progress, **options: Any) -> None:
    seed_everything(3)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[progress],
        **options,
    )
    trainer.fit(Stack())


def main(folder: Path) -> None:
    snapshots.MEMORY = Path(memory_of_this_host(str(folder / "memory")))
    strategy = HolmesStrategy(
        pipeline_parallel_size=2,
        num_microbatches=2,
        timeout=timedelta(seconds=120),
        snapshot_every_n_steps=100,
    )
    progress = Progress(folder, os.environ["ATTEMPT"], os.environ["END"])
    train(progress, strategy=strategy, devices=1, num_nodes=2)


if __name__ == "__main__":
    join_as_torchrun_would()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
