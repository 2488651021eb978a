"""The worker that runs on every host of a testbed whose connections or processes fail: a fit that saves checkpoints
and can resume.

python fault_worker.py FOLDER '{"num_nodes": 2, "timeout_s": 300, "kill_rank": 1}'

Prints a line per step and appends a line with the step and its loss to ``losses.RANK.ATTEMPT`` after each step.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training_worker import join_as_torchrun_would

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import saving
from lightning_holmes.data import CountedDataModule
from lightning_holmes.optim.node.link import Action, Link
from lightning_holmes.strategy import snapshots

STEPS, FEATURES, KILLED_AT, SAVED_EVERY = 10, 64, 6, 2


class Counted(CountedDataModule):
    """A data module of which all replicas together read eight rows per step, whatever their number."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size=batch_size, seed=1)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.make_train_loader(rows())


def rows() -> TensorDataset:
    """Return the rows of one epoch; an ordinary loader reads them again in each epoch."""
    generator, count = torch.Generator().manual_seed(1), SAVED_EVERY * 8
    return TensorDataset(torch.randn(count, FEATURES, generator=generator), torch.randn(count, 1, generator=generator))


class Stack(LightningModule):
    """Equal layers and a head. ``kill``: this process kills itself in the middle of step KILLED_AT, as in a fault of
    its host. ``waits`` (a hook and a card or file): in that hook of that step, the process waits until the card goes
    down or the file exists."""

    def __init__(self, *, kill: bool = False, waits: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.waits = waits
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)
        self.kill, self.calls = kill, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls += self.trainer.global_step == KILLED_AT
        if self.kill and self.calls == 2:  # the second microbatch
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 2:
            self.wait_in("training_step")
        hidden, target = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.mse_loss(self.head(hidden), target)

    def wait_in(self, hook: str) -> None:
        if self.waits is not None and hook == self.waits[0] and self.trainer.global_step == KILLED_AT:
            print("waiting", flush=True)
            while not os.path.exists(what) if "/" in (what := self.waits[1]) else psutil.net_if_stats()[what].isup:
                time.sleep(0.01)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.wait_in("on_before_optimizer_step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        data = rows()
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        parts, part = kwargs["num_replicas"], kwargs["rank"]
        return DataLoader(data, batch_size=8 // parts, sampler=range(part, len(data), parts))


class Eager(Stack):
    """A Stack without on_before_optimizer_step, so that optimizer nodes update layers as their gradients arrive."""

    on_before_optimizer_step = LightningModule.on_before_optimizer_step


class Progress(Callback):
    """Prints the steps and records their losses. If it ``grows`` and the process is the only one, it waits after step KILLED_AT + 1 until it gets
    SIGTERM."""

    def __init__(self, folder: Path | None = None, attempt: str = "0", *, grows: bool = False) -> None:
        self.folder, self.attempt, self.grows = folder, attempt, grows
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])
        print(f"step {trainer.global_step} done", flush=True)
        if self.folder is not None:
            path = self.folder / f"losses.{trainer.global_rank}.{self.attempt}"
            with path.open("a") as file:
                file.write(f"{trainer.global_step} {outputs['loss']:.9g}\n")
        if self.grows and trainer.world_size == 1 and trainer.global_step == KILLED_AT + 1:
            print("alone", flush=True)
            end = time.monotonic() + 60
            while not trainer.received_sigterm and time.monotonic() < end:
                time.sleep(0.01)


def train(
    progress: Progress,
    *,
    kill: bool = False,
    waits: tuple[str, str] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    data: CountedDataModule | None = None,
    kind: type[Stack] = Stack,
    **options: Any,
) -> None:
    """Train STEPS steps; with a ``folder``, save a checkpoint every SAVED_EVERY steps, and with ``resume`` go on from
    the last one."""
    seed_everything(3)
    callbacks: list[Callback] = [progress]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder / "checkpoints", save_last=True, save_on_train_epoch_end=True))
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=STEPS // SAVED_EVERY,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    module = kind(kill=kill, waits=waits)
    trainer.fit(module, datamodule=data, ckpt_path="last" if resume else None)


def write_when_the_link_is_cut(card: str = "eth0", count: int = 4, word: str = "writing") -> None:
    """Print ``word`` and wait when this process writes a part of a checkpoint for the ``count``-th time, until
    ``card`` is down; the test cuts it. With the defaults, this is the second write of last.ckpt, each of which
    follows the write of its epoch's file."""
    write, written = saving.write_part, []

    def wait_and_write(*args: Any) -> Any:
        written.append(args)
        if len(written) == count:
            print(word, flush=True)
            while psutil.net_if_stats()[card].isup:
                time.sleep(0.01)
        return write(*args)

    saving.write_part = wait_and_write


def push_when_the_link_is_cut(told: str) -> None:
    """In step KILLED_AT, hold back the second gradient that this process names to an optimizer node, and all later
    actions, until the file ``told`` exists: the node may have updated the layer of the first gradient."""
    own, gradients = Link.order, []

    def wait_and_order(link: Link, action: Action, **arguments: Any) -> Any:
        if action is Action.GRADIENT and arguments["number"] == KILLED_AT:
            gradients.append(arguments)
            if len(gradients) == 2:
                print("waiting", flush=True)
                while not os.path.exists(told):
                    time.sleep(0.01)
        return own(link, action, **arguments)

    Link.order = wait_and_order  # type: ignore[method-assign]


def memory_of_this_host(folder: str) -> str:
    """Bind-mount a folder of this host at ``folder`` and return ``folder``: each host sees its own files, and sees
    them again in a later run."""
    own = f"{folder}.{os.environ['HOLMES_HOST_NAME']}"
    for path in (folder, own):
        os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "--bind", own, folder], check=True, timeout=10)
    return folder


def main(folder: Path, options: dict[str, Any]) -> None:
    attempt = options.get("attempt", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if options.get("grows"):  # torchrun does not count a restart that only adds hosts
        attempt = str(len(list(folder.glob(f"losses.{os.environ['RANK']}.*"))))
    late = ("0", "2") if options.get("grows") else ("0",)
    if int(os.environ["WORLD_SIZE"]) < options["num_nodes"] and attempt in late:  # the other host is late, or back
        signal.pause()  # until torchrun notices it and ends this process
    kill = attempt == "0" and os.environ["RANK"] == str(options.get("kill_rank"))
    if os.environ["RANK"] == str(options.get("waits_for_cut")):
        write_when_the_link_is_cut()
    waits = options.get("waits")
    if waits and os.environ["RANK"] != ("0" if waits[0] == "pushing" else "1"):  # worker 0 names the nodes' actions
        waits = None
    if waits and waits[0] == "writing":
        write_when_the_link_is_cut(waits[1], 2 * KILLED_AT // SAVED_EVERY - 1, "waiting")
    if waits and waits[0] == "pushing":
        push_when_the_link_is_cut(waits[1])
    every = None
    if "snapshots" in options:
        every = options.get("every", 1)
        snapshots.MEMORY = Path(memory_of_this_host(options["snapshots"]))
    strategy = HolmesStrategy(
        pipeline_parallel_size=int(os.environ["WORLD_SIZE"])
        if options.get("pipeline") == "hosts"
        else options.get("pipeline", 2),
        num_microbatches=2,
        timeout=timedelta(seconds=options.get("timeout_s", 300)),
        optimizer_nodes=options.get("optimizer_nodes", 0),
        optimizer_states=options.get("optimizer_states", "memory"),
        gradient_sync=options.get("gradient_sync", "auto"),
        snapshot_every_n_steps=every,
    )
    train(
        Progress(folder, attempt, grows=options.get("grows", False)),
        kill=kill,
        waits=waits,
        folder=folder,
        resume=attempt != "0" and every is None,
        kind=Eager if options.get("eager") else Stack,
        data=Counted(4) if options.get("grows") else None,
        strategy=strategy,
        devices=options.get("devices", 1),
        num_nodes=options["num_nodes"],
    )


if __name__ == "__main__":
    if "RANK" not in os.environ:
        join_as_torchrun_would()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
