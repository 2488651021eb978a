"""Runs fits in real processes and records their results.

    records = run_fits([fit, other])          # one launch for each world size

Starting a process costs more than a small fit, so all fits of one world size run in the same processes, one after the
other. If a fit ends in an exception or does not end, the remaining ones run in a new launch.
"""

import pickle
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from launch import keep_what_is_left, launch_raw
from lightning.pytorch import Trainer
from parity_fit import Fit
from parity_models import FAMILIES
from quiet import quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.optim import bucket_reducer

WORKER_TIMEOUT_S = 400.0  # a fit takes about a second


@dataclass
class Record:
    """What one rank saw of a fit; ``error`` is set if it ended in an exception.

    For each batch: ``losses``, ``logs`` (the step's), ``weights`` (samples, or whatever the loss is a mean over). For each
    optimizer step: ``norms``, before clipping. At the end: ``metrics`` (the epoch's), the whole ``state``, and ``syncs``:
    the collectives of the plan. ``seconds`` is the fit's duration.
    """

    data_parallel_rank: int = 0
    losses: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    syncs: set[str] = field(default_factory=set)
    error: str = ""
    seconds: float = 0.0


def run_fits(fits: Sequence[Fit]) -> dict[Fit, list[Record]]:
    """Run the fits; return the records of each, by rank."""
    records: dict[Fit, list[Record]] = {}
    for world_size in sorted({fit.world_size for fit in fits}):
        remaining = [fit for fit in dict.fromkeys(fits) if fit.world_size == world_size]
        while remaining:
            done = _launch(world_size, remaining)
            records |= done
            remaining = [fit for fit in remaining if fit not in done]
    return records


def _launch(world_size: int, fits: list[Fit]) -> dict[Fit, list[Record]]:
    """Launch the fits once; return the records up to the first fit that failed."""
    with tempfile.TemporaryDirectory(prefix="holmes-parity-") as name:
        folder = Path(name)
        workers = launch_raw(
            world_size, "parity_runs:work", (name, fits), timeout_s=WORKER_TIMEOUT_S, folder=folder / "launch"
        )
        records: dict[Fit, list[Record]] = {}
        for index, fit in enumerate(fits):
            found = []
            for rank, worker in enumerate(workers):
                path = folder / f"{index}.{rank}"
                if path.exists():
                    found.append(pickle.loads(path.read_bytes()))
                else:
                    ending = "did not end" if worker.exit_code is None else f"ended with code {worker.exit_code}"
                    found.append(Record(error=f"rank {rank} {ending}:\n{worker.output[-3000:]}"))
            records[fit] = found
            if any(record.error for record in found):
                break
        return records


def work(payload: tuple[str, list[Fit]]) -> None:
    """Run all fits until one fails; runs in each process. Each record is written as soon as its fit ends."""
    folder, fits = payload
    for index, fit in enumerate(fits):
        started = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            record, rank = run_fit(fit)
        record.seconds = time.monotonic() - started
        record.warnings = [str(w.message) for w in caught if "batch normalisation" in str(w.message)]
        temporary = Path(folder) / f"{index}.{rank}.part"
        temporary.write_bytes(pickle.dumps(record))
        temporary.rename(temporary.with_suffix(""))
        if record.error:
            return
        keep_what_is_left()


def run_fit(fit: Fit) -> tuple[Record, int]:
    """Run a fit in this process, together with the other processes of the launch; return its record and the rank."""
    pl.seed_everything(5, verbose=False)
    family = FAMILIES[fit.family]
    module = family.build(fit.num_layers)
    bucket_reducer.LEAST_BUCKET_BYTES = 2048  # so that small modules have several buckets
    recorder = Recorder()
    strategy: Any = "auto"
    if fit.layout is not None:
        layout = fit.layout
        strategy = HolmesStrategy(
            pipeline_parallel_size=layout.pipeline_parallel_size,
            num_microbatches=layout.num_microbatches,
            eval_num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,  # type: ignore[arg-type]
            num_chunks=layout.num_chunks,
            gradient_sync=layout.gradient_sync,
            topology=crossed(fit) if layout.gradient_sync == "hierarchical" else "auto",
            sharding=layout.sharding,  # type: ignore[arg-type]
            partition="uniform" if layout.partition is None else list(layout.partition),
        )
    trainer = quiet_trainer(
        strategy,
        devices=fit.world_size,
        precision=fit.precision,
        max_epochs=1,
        accumulate_grad_batches=fit.accumulate_grad_batches,
        gradient_clip_val=fit.gradient_clip_val,
        gradient_clip_algorithm=fit.gradient_clip_algorithm,
        limit_train_batches=fit.limit_train_batches,
        callbacks=[recorder],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    record = recorder.record
    record.initial = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        trainer.fit(module, datamodule=Samples(fit))
    except Exception as exception:
        record.error = f"{type(exception).__name__}: {exception}"
    else:
        record.state = {name: value.clone() for name, value in module.state_dict().items()}
    return record, trainer.global_rank


def crossed(fit: Fit) -> Topology:
    """Return a topology with two clusters for each stage, so that the stage's replicas are in both."""
    assert fit.layout is not None
    number = 2 * fit.layout.pipeline_parallel_size
    hosts = [Host(name=f"c{index}", devices=fit.world_size // number) for index in range(number)]
    return Topology(clusters=tuple(Cluster(name=host.name, hosts=(host,)) for host in hosts))


class Samples(pl.LightningDataModule):
    """The samples of a fit's family in order; a replica takes every n-th of them, n being the number of replicas."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.batch_size = fit.batch_size
        self.family = FAMILIES[fit.family]
        self.training, self.validation = self.family.samples()

    def loader(self, samples: list[dict[str, Tensor]], batch_size: int) -> DataLoader:
        assert self.trainer is not None
        sharing = {"num_replicas": 1, "rank": 0}
        if isinstance(self.trainer.strategy, HolmesStrategy):
            sharing = self.trainer.strategy.distributed_sampler_kwargs
        indices = range(sharing["rank"], len(samples), sharing["num_replicas"])
        size = batch_size // sharing["num_replicas"]
        return DataLoader(samples, batch_size=size, sampler=indices, collate_fn=self.family.collate)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.training, self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.validation, 4)


class Recorder(pl.Callback):
    """Fills the record of a fit."""

    def __init__(self) -> None:
        self.record = Record()

    def on_before_optimizer_step(self, trainer: Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, HolmesStrategy):
            norm = trainer.strategy.global_grad_norm(module.parameters())
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.record.norms.append(norm.item())

    def on_train_batch_end(
        self, trainer: Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        weight = getattr(module, "microbatch_weight", lambda batch: len(next(iter(batch.values()))))
        self.record.losses.append(outputs["loss"].item())
        self.record.logs.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("train_")})
        self.record.weights.append(float(weight(batch)))
        if isinstance(trainer.strategy, HolmesStrategy):
            self.record.syncs |= set(trainer.strategy.plan.collectives)

    def on_fit_end(self, trainer: Trainer, module: pl.LightningModule) -> None:
        steps = self.record.logs[-1]
        self.record.metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k not in steps}
        self.record.data_parallel_rank = getattr(trainer.strategy, "data_parallel_rank", 0)
