"""One process of one contender: trains, and writes the times of its steps and the bytes that its network cards sent.

    torchrun ... tests/benchmarks/bench_worker.py ddp FOLDER

FOLDER holds job.json, written by bench.py; each rank writes FOLDER/rank<N>.json.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_report import show_seconds
from benchmarks.contenders import make_contender
from benchmarks.workload import SharedBatches, Workload
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from quiet import quiet_trainer

from lightning_holmes import HolmesStrategy


class Clock(Callback):
    """Records the start of each step, and the cards' counters of sent bytes at the start and end of the measured steps.

    A step, of one batch or several, lasts until the start of the next step. Ranks are not synchronised for it.
    """

    def __init__(self, warmup_steps: int, batches: int = 1) -> None:
        self.warmup_steps = warmup_steps
        self.batches = batches
        self.marks_s: list[float] = []
        self.sent_bytes: list[dict[str, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.batches:
            return
        self.marks_s.append(time.perf_counter())
        if len(self.marks_s) == self.warmup_steps + 1:
            self.sent_bytes.append(read_sent_bytes())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.marks_s.append(time.perf_counter())
        self.sent_bytes.append(read_sent_bytes())

    def measured_s(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        marks = self.marks_s[self.warmup_steps :]
        return [end - start for start, end in itertools.pairwise(marks)]


def read_sent_bytes() -> dict[str, int]:
    """Bytes that each interface of this host has sent."""
    return {
        folder.name: int((folder / "statistics" / "tx_bytes").read_text())
        for folder in Path("/sys/class/net").iterdir()
        if folder.name != "lo"
    }


def describe_plan(strategy: Strategy) -> str | None:
    """The schedule, layers and prediction of HolmesStrategy, in words; None for any other strategy."""
    if not isinstance(strategy, HolmesStrategy):
        return None
    plan, prediction = strategy.plan, strategy.prediction
    layers = ", ".join(map(str, plan.partition.layer_counts))
    described = f"{plan.schedule}, {plan.num_microbatches} microbatches, layers {layers}"
    return described if prediction is None else f"{described}; {show_seconds(prediction.step_s)} s a step predicted"


def main(name: str, folder: Path) -> None:
    """Train as the contender `name`."""
    job, contender = json.loads((folder / "job.json").read_text()), make_contender(name)
    workload, world_size = Workload(**job["workload"]), job["world_size"]
    seed_everything(1, verbose=False)
    accumulated = workload.microbatches if contender.accumulates else 1
    clock = Clock(workload.warmup_steps, accumulated)
    trainer = quiet_trainer(
        devices=1,
        num_nodes=1 if contender.alone else world_size,
        strategy=contender.make_strategy(world_size),
        accumulate_grad_batches=accumulated,
        max_steps=workload.warmup_steps + workload.steps,
        limit_val_batches=0,
        default_root_dir=job["output"],
        callbacks=[clock],
    )
    data = SharedBatches(workload, num_replicas=world_size if contender.alone else None, accumulated=accumulated)
    trainer.fit(contender.module(**workload.model_arguments), datamodule=data)
    before, after = clock.sent_bytes
    found = {
        "host": os.environ["HOLMES_HOST_NAME"],
        "steps_s": clock.measured_s(),
        "sent_bytes": {interface: after[interface] - before[interface] for interface in after},
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "plan": describe_plan(trainer.strategy),
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
