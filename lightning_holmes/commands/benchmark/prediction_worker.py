"""One process of a bed of predicted runs: trains each case in turn, and writes the predicted and measured times.

    torchrun ... -m lightning_holmes.commands.benchmark.prediction_worker FOLDER

FOLDER holds bed.json, written by `bench`; after every case each rank writes FOLDER/rank<N>.json, and rank 0 prints a line that
begins with PROGRESS.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.benchmark.bench_report import show_seconds
from lightning_holmes.commands.benchmark.prediction_beds import PROGRESS
from lightning_holmes.commands.benchmark.worker import StepClock, describe_schedule
from lightning_holmes.commands.benchmark.workload import SharedBatches, Workload
from lightning_holmes.models import GPT
from lightning_holmes.strategy import HolmesStrategy


def main(folder: Path) -> None:
    """Run all cases of the bed."""
    bed = json.loads((folder / "bed.json").read_text())
    topology = Topology.from_yaml_text(bed["topology"], source="bench")
    found: list[dict[str, Any]] = []
    for index, case in enumerate(bed["cases"]):
        found.append(train(case, topology, bed["num_hosts"], folder / f"case{index}"))
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        if os.environ["RANK"] == "0":
            seconds, count = statistics.median(found[-1]["steps_s"]), f"[{index + 1}/{len(bed['cases'])}]"
            print(f"{PROGRESS} {count} {case['name']} ... about {show_seconds(seconds)} s a step", flush=True)
        gc.collect()


def train(case: dict[str, Any], topology: Topology, num_hosts: int, folder: Path) -> dict[str, Any]:
    """Train one case; return the seconds of its steps and, on rank 0, the prediction and the timeline."""
    workload = Workload.from_json(case["workload"])
    seed_everything(1, verbose=False)
    clock = StepClock(workload.warmup_steps)
    strategy = HolmesStrategy(topology=topology, **case["arguments"])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=num_hosts,
        strategy=strategy,
        max_steps=workload.warmup_steps + workload.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[clock, TimelineMonitor(draw=False)],
    )
    trainer.fit(GPT(**workload.model_arguments), datamodule=SharedBatches(workload, num_replicas=None))
    result: dict[str, Any] = {"name": case["name"], "steps_s": clock.measured_s()}
    if trainer.is_global_zero:
        prediction, plan = strategy.prediction, strategy.plan
        result |= {
            "predicted_s": None if prediction is None else prediction.step_s,
            "layers": list(plan.partition.layer_counts),
            "schedule": describe_schedule(plan),
            "notes": list(plan.notes),
            "timeline": json.loads((folder / "timeline.json").read_text()),
        }
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
