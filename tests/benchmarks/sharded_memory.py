"""Print a table of the optimizer's memory and time, whole and sharded over four replicas: `PYTHONPATH=tests python
tests/benchmarks/sharded_memory.py`

Each kind runs in its own four processes, since the peak of resident memory never falls again.
"""

import resource
import statistics
import time
from typing import Any

import torch
from launch import launch
from lightning.pytorch import Callback, Trainer
from step_time_workers import Windows, build
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy

STEPS, SKIPPED = 8, 2


class Clock(Callback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def run(options: dict[str, Any]) -> dict[str, float]:
    """One rank's fit."""
    torch.set_num_threads(1)
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=HolmesStrategy(pipeline_parallel_size=1, num_microbatches=1, **options),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    module = build(384, 6)  # 11.6 M parameters with its embeddings and head
    trainer.fit(module, DataLoader(Windows(4 * STEPS), batch_size=1))
    states = trainer.optimizers[0].state.values()
    return {
        "state": sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor)),
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "step": statistics.median(
            b - a for a, b in zip(clock.marks[SKIPPED:], clock.marks[SKIPPED + 1 :], strict=False)
        ),
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def main() -> None:
    print("| `sharding` | optimizer state a rank, MiB | peak RSS a rank, MiB | median step, s |")
    print("|---|---|---|---|")
    for sharding in ("none", "optimizer"):
        ranks = launch(4, "sharded_memory:run", {"sharding": sharding}, timeout_s=200)
        largest = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        mib = 2**20
        print(f"| {sharding} | {largest['state'] / mib:.1f} | {largest['peak'] / mib:.0f} | {largest['step']:.3f} |")
    print(f"{largest['parameters'] / 1e6:.1f} M parameters, AdamW, four processes")


if __name__ == "__main__":
    main()
