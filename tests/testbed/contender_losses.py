"""Train a small GPT under a contender's strategy; rank 0 writes the losses, each the mean over all ranks.

torchrun --nproc-per-node 2 contender_losses.py ddp FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_holmes.commands.bench import make_topology
from lightning_holmes.commands.benchmark.contenders import CONTENDERS, BenchmarkJob
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.models import GPT

STEPS, MICROBATCHES = 3, 2


class Tokens(Dataset[dict[str, Tensor]]):
    """A data set with few kinds of tokens, so that the loss falls."""

    def __len__(self) -> int:
        return 2 * 2 * MICROBATCHES * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 20, (17,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Losses(Callback):
    """Records the loss of each microbatch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.seen.append(float(loss))


def main(name: str, path: Path) -> None:
    topology = make_topology([1], devices=2, fast_bytes_per_s=1e9, ethernet_bytes_per_s=1e9)
    workload = Workload(hidden_size=48, num_layers=3, sequence_length=16, microbatches=MICROBATCHES)
    job = BenchmarkJob(topology=topology, processes_per_host=2, workload=workload)
    seed_everything(1, verbose=False)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CONTENDERS[name].make_strategy(job),
        accumulate_grad_batches=MICROBATCHES,
        max_steps=STEPS,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(**workload.model_arguments, learning_rate=0.1), DataLoader(Tokens(), batch_size=2))
    if trainer.is_global_zero:
        path.write_text(json.dumps(losses.seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
