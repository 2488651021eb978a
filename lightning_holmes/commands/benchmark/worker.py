"""One process of one contender: trains, and writes the times of its steps and the bytes that its network cards sent and received.

    torchrun ... -m lightning_holmes.commands.benchmark.worker ddp FOLDER

FOLDER holds job.json, written by `bench`; each rank writes FOLDER/rank<N>.json, and rank 0 the timeline if requested.
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

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.benchmark.bare_sockets import BareSockets
from lightning_holmes.commands.benchmark.bench_report import show_seconds
from lightning_holmes.commands.benchmark.contenders import CONTENDERS, BenchmarkJob
from lightning_holmes.commands.benchmark.workload import SharedBatches, Workload
from lightning_holmes.optim.node.server import DEFAULT_PORT
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy import HolmesStrategy

TIMELINE = "timeline.json"
"""The file name of a run's timeline; the picture is in the same folder."""

_INTERFACES = Path("/sys/class/net")


class StepClock(Callback):
    """Records the start of each step, and the network cards' byte counters at the start and end of the measured steps.

    A step, of one batch or several, lasts until the start of the next step. Ranks are not synchronised for it.
    """

    def __init__(self, warmup_steps: int, batches: int = 1) -> None:
        self.warmup_steps = warmup_steps
        self.batches = batches
        self.marks_s: list[float] = []
        self.sent_bytes: list[dict[str, int]] = []
        self.received_bytes: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.batches:
            return
        self.marks_s.append(time.perf_counter())
        if len(self.marks_s) == self.warmup_steps + 1:
            self._read()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.marks_s.append(time.perf_counter())
        self._read()

    def _read(self) -> None:
        self.sent_bytes.append(read_bytes("tx_bytes"))
        self.received_bytes.append(sum(read_bytes("rx_bytes").values()))

    def measured_s(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        marks = self.marks_s[self.warmup_steps :]
        return [end - start for start, end in itertools.pairwise(marks)]


def read_bytes(counter: str) -> dict[str, int]:
    """Bytes that each interface of this host has sent ("tx_bytes") or received ("rx_bytes")."""
    return {
        folder.name: int((folder / "statistics" / counter).read_text())
        for folder in _INTERFACES.iterdir()
        if folder.name != "lo"
    }


def describe_schedule(plan: Plan) -> str:
    """Schedule and microbatches, in words."""
    return f"{plan.schedule}, {plan.num_microbatches} microbatches"


def describe_plan(strategy: Strategy) -> str | None:
    """The schedule, layers and prediction of HolmesStrategy, in words; None for any other strategy."""
    if not isinstance(strategy, HolmesStrategy):
        return None
    plan, prediction = strategy.plan, strategy.prediction
    layers = ", ".join(map(str, plan.partition.layer_counts))
    described = f"{describe_schedule(plan)}, layers {layers}"
    return described if prediction is None else f"{described}; {show_seconds(prediction.step_s)} s a step predicted"


def read_job(folder: Path) -> BenchmarkJob:
    """The job that `bench` wrote."""
    data = json.loads((folder / "job.json").read_text())
    return BenchmarkJob(
        topology=Topology.from_yaml_text(data["topology"], source="bench"),
        processes_per_host=data["processes_per_host"],
        workload=Workload.from_json(data["workload"]),
    )


def main(name: str, folder: Path) -> None:
    """Train as the contender `name`."""
    job, contender = read_job(folder), CONTENDERS[name]
    workload = job.workload
    seed_everything(1, verbose=False)
    accumulated = workload.microbatches if contender.accumulates else 1
    clock = StepClock(workload.warmup_steps, accumulated)
    strategy, callbacks = contender.make_strategy(job), list[Callback]([clock])
    if any(contender.carried):
        num_bytes = [passes * 4 * workload.num_parameters for passes in contender.carried]
        # after the clock, so that it reads its counters before the transfers start
        callbacks.append(BareSockets(*num_bytes, batches=accumulated))
    if contender.exchanged:
        sent = contender.exchanged * 4 * workload.num_parameters * (job.world_size - 1) // job.world_size
        callbacks.append(BareSockets(sent, 0, batches=accumulated, port=DEFAULT_PORT))
    if json.loads((folder / "job.json").read_text())["timeline"] and isinstance(strategy, HolmesStrategy):
        callbacks.append(TimelineMonitor(file=TIMELINE))
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if contender.alone else job.processes_per_host,
        num_nodes=1 if contender.alone else job.num_hosts,
        strategy=strategy,
        accumulate_grad_batches=accumulated,
        max_steps=workload.warmup_steps + workload.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    data = SharedBatches(workload, num_replicas=job.world_size if contender.alone else None, accumulated=accumulated)
    trainer.fit(contender.make_module(job), datamodule=data)
    before, after = clock.sent_bytes
    found = {
        "host": os.environ["HOLMES_HOST_NAME"],
        "steps_s": clock.measured_s(),
        "sent_bytes": {interface: after[interface] - before[interface] for interface in after},
        "received_bytes": clock.received_bytes[1] - clock.received_bytes[0],
        "samples": data.batch_size,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "plan": describe_plan(trainer.strategy),
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
