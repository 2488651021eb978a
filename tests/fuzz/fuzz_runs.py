"""A run of a case in the processes of a job, and what is kept of it. The processes stay up from one run to the next.

    with Pool() as pool:
        records = pool.run("holmes", Run(case, folder, strategy={"pipeline_parallel_size": 2}), world_size=2)

A run that ends in an error, or does not end, takes its processes with it: the next run of that kind starts new ones.
"""

import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from launch import PATIENCE, forked_executable, free_port, keep_what_is_left, start_worker
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from quiet import quiet_trainer
from torch import Tensor
from torchmetrics import Metric
from traits import HABITS, TRAINER, Case, make_loader, make_module

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint.converting import read_whole
from lightning_holmes.errors import AbsentValueError, ConfigurationError, HolmesError, UnsupportedModuleError

REFUSALS = (ConfigurationError, UnsupportedModuleError, AbsentValueError)
RUN_S = 40.0
_OF_CHECKPOINT = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch", "state_of_case")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit of a case. ``strategy``: HolmesStrategy's arguments, or None for plain Lightning (DDP in several processes);
    ``resume``: a checkpoint."""

    case: Case
    folder: str
    strategy: dict[str, Any] | None = None
    resume: str | None = None


@dataclass
class Record:
    """What one rank has of a run: ``values`` by name (losses, logs, what hooks saw, weights, the checkpoint), or its error."""

    values: dict[str, Any] = field(default_factory=dict)
    num_batches: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    is_refusal: bool = False
    is_remote: bool = False
    checkpoint: str = ""


class Lines(Logger):
    """Keeps what is logged. Its ``experiment`` is a list that a step may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []
        self.calls: list[float] = []

    name, version = "lines", 0
    experiment = property(lambda self: self.calls)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append(dict(metrics) | {"step": step or 0})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Watch(Callback):
    """Notes the logged values and the learning rates of each epoch."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.epochs.append({"logged": _logged(trainer), "step": trainer.global_step, "lr": rates})


class WatchBatches(Watch):
    """Notes the loss and the logged values of each batch, too."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append({"loss": outputs["loss"].item(), "logged": _logged(trainer)})


def _logged(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists by their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{name}/{index}")
    elif isinstance(value, Tensor):
        yield name, _whole(value).detach().double().clone()
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    else:
        yield name, value if isinstance(value, (str, type(None))) else type(value).__name__


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def fit(run: Run) -> Record:
    """Run a fit in this process, together with the others of its job."""
    case, folder, record = run.case, Path(run.folder), Record()
    pl.seed_everything(5, verbose=False)
    watch = Watch() if case.get("hooks") == "each epoch" else WatchBatches()
    module, logger = make_module(case), Lines()
    world_size = int(os.environ["WORLD_SIZE"])
    strategy: Any = "auto" if world_size == 1 else DDPStrategy(find_unused_parameters=True)
    if run.strategy is not None:
        strategy = HolmesStrategy(**run.strategy, timeout=timedelta(seconds=RUN_S * PATIENCE))
    habits = [HABITS[case.get(axis, "none")] for axis in ("habit", "second habit")]
    callbacks: list[Callback] = [make() for make in dict.fromkeys(habits) if make is not None]
    checkpoint = case.get("checkpoint", "none")
    if checkpoint in ("middle", "epoch"):
        when: dict[str, Any] = {"every_n_train_steps": 3} if checkpoint == "middle" else {"every_n_epochs": 1}
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, **when))
    evaluation, clip = case.get("evaluation", "none"), case.get("clip")
    options: dict[str, Any] = {
        "default_root_dir": folder,
        "precision": case["precision"] if case.get("precision", "double") != "double" else "32-true",
        "max_epochs": 2 if run.resume is None else 3,
        "accumulate_grad_batches": int(case.get("accumulate", "1")),
        "gradient_clip_val": {"norm": 0.2, "value": 0.01}.get(clip or ""),
        "gradient_clip_algorithm": clip,
        "val_check_interval": 2 if evaluation == "mid-epoch" else None,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 1 if evaluation == "metric" else 0,
        "log_every_n_steps": 1,
        "logger": logger,
        "enable_checkpointing": checkpoint in ("middle", "epoch"),
        "use_distributed_sampler": False,
        "callbacks": [*callbacks, watch],
    }
    trainer = quiet_trainer(strategy, devices=world_size, **(options | TRAINER[case.get("trainer", "default")]))
    try:
        data = Data(case)
        trainer.fit(module, datamodule=data, ckpt_path=run.resume, weights_only=False if run.resume else None)
        found: dict[str, Any] = {"weights": module.state_dict()}
        if isinstance(module.kept, Metric):
            found["metric"] = float(module.kept.compute())
        if evaluation == "predict":
            found["predictions"] = trainer.predict(module, datamodule=data)
            if (folder / "rows").exists():
                if dist.is_initialized():
                    dist.barrier()
                found["written"] = sorted(map(float, (folder / "rows").read_text().split()))
        if checkpoint != "none":
            end = folder / f"end{bool(run.resume):d}"
            trainer.save_checkpoint(end)
            if trainer.is_global_zero:
                saved = read_whole(end) if end.is_dir() else torch.load(end, weights_only=False)
                found["saved"] = {key: saved[key] for key in _OF_CHECKPOINT if key in saved}
        if evaluation == "test":
            path = None if checkpoint == "none" else str(end)
            found["tested"] = trainer.test(module, datamodule=data, ckpt_path=path, weights_only=False, verbose=False)
        record.values |= dict(flat(found))
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", ()) if "it runs over the whole batch" in note]
        record.error = "; ".join((f"{type(error).__name__}: {error}", *notes))
        # a node's refusals have the base class
        record.is_refusal = isinstance(error, REFUSALS) or type(error) is HolmesError or bool(notes)
        record.is_remote = isinstance(error, HolmesError) and not record.is_refusal
    record.num_batches = len(watch.batches)
    record.values |= dict(flat({"batches": watch.batches}))
    if not record.error:
        seen = {"epochs": watch.epochs, "logger": logger.lines, "calls": logger.calls, "seen": module.seen}
        record.values |= dict(flat(seen))
        files = sorted(folder.glob("step=*"), key=lambda path: int(path.stem.partition("=")[2]))
        record.checkpoint = str(files[0]) if files else ""
    return record


class Data(pl.LightningDataModule):
    """The loaders of a case, made when the trainer asks for them: it knows its replicas then."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> Any:
        return make_loader(self.case, self.trainer, shuffle=self.case.get("shuffle") == "yes")

    def val_dataloader(self) -> Any:
        validates = self.case.get("evaluation", "none") not in ("none", "predict", "test")
        return make_loader(self.case, self.trainer) if validates else []

    def predict_dataloader(self) -> Any:
        return make_loader(self.case, self.trainer)

    test_dataloader = predict_dataloader


def serve(address: str) -> None:
    """Run what the pool asks for, until it closes the connection; in each process of a job."""
    torch.set_num_threads(1)
    with Client(address) as pool:
        pool.send(int(os.environ["RANK"]))
        while True:
            try:
                run = pool.recv()
            except EOFError:
                return
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                record = fit(run)
            record.warnings = [str(each.message) for each in told]
            if os.environ["RANK"] != "0":
                record.values = {}
            pool.send_bytes(pickle.dumps(record))  # not send, by which torch shares memory
            keep_what_is_left()


class Job:
    """Processes that form one job."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="holmes-fuzz-", ignore_cleanup_errors=True)
        root, address = Path(self.folder.name), f"{self.folder.name}/socket"
        (root / "payload").write_bytes(pickle.dumps(("fuzz_runs:serve", address)))
        environment = {"PYTHON_EXEC": forked_executable()}
        port = free_port()
        with Listener(address, backlog=world_size) as listener:
            self.pids = [start_worker(root, rank, world_size, port, environment) for rank in range(world_size)]
            found: dict[int, Connection] = {}
            while len(found) < world_size:
                connection = listener.accept()
                found[connection.recv()] = connection
        self.ranks = [found[rank] for rank in range(world_size)]

    def run(self, run: Run) -> list[Record]:
        """Return the record of each rank; a rank that ended or hung has an error that says so."""
        for rank in self.ranks:
            rank.send(run)
        records: dict[int, Record] = {}
        until = time.monotonic() + RUN_S * PATIENCE
        while len(records) < len(self.ranks) and time.monotonic() < until:
            if any(record.error for record in records.values()):
                until = min(until, time.monotonic() + 10 * PATIENCE)  # the others must end, too
            waiting = [rank for index, rank in enumerate(self.ranks) if index not in records]
            for rank in wait(waiting, timeout=1.0):
                index = self.ranks.index(rank)  # type: ignore[arg-type]
                try:
                    records[index] = pickle.loads(rank.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    log = Path(self.folder.name, f"log{index}").read_text(errors="replace")
                    records[index] = Record(error=f"ended: {log[-1500:]}", is_remote=True)
        return [records.get(index, Record(error="hung")) for index in range(len(self.ranks))]

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.close()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends = [Path(self.folder.name, f"exit{rank}") for rank in range(len(self.pids))]
        until = time.monotonic() + 5
        while time.monotonic() < until and not all(end.exists() for end in ends):
            time.sleep(0.005)  # the nursery still writes there
        self.folder.cleanup()


class Pool:
    """A job for each kind of run and number of processes, started when first needed. Two threads may run two kinds at the same time."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[bool, int], Job] = {}
        self._starting = threading.Lock()

    def run(self, run: Run, world_size: int) -> list[Record]:
        """Run in a job of ``world_size`` processes; plain Lightning and this package do not share processes."""
        key = run.strategy is None, world_size
        with self._starting:
            if key not in self.jobs:
                self.jobs[key] = Job(world_size)
        records = self.jobs[key].run(run)
        if any(record.error for record in records):
            self.jobs.pop(key).close()
        return records

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        while self.jobs:
            self.jobs.popitem()[1].close()
