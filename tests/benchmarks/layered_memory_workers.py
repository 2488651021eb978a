"""What the memory tests of sharded parameters run in their processes: a deep module of equal layers, built without memory."""

import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from memory_limit import resident_mb
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.commands.convert import main as convert

STATES = 4
"""Parameters, gradients, and Adam's two moments: together this multiple of the parameters' bytes."""


class Block(nn.Module):
    """A linear layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Deep(pl.LightningModule):
    """Equal layers and nothing else; with a batch of one sample it has hardly any activations."""

    def __init__(self, width: int, depth: int, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.width, self.depth, self.is_checkpointed = width, depth, is_checkpointed
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.ModuleList(Block(self.width) for _ in range(self.depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)
        loss = hidden.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


class ShardedDeep(Deep):
    """The same module for FSDP2; each layer is sharded before it has memory."""

    def configure_model(self) -> None:
        if self.layers is None:
            with torch.device("meta"):
                super().configure_model()
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)


def trainer(strategy: Any, **length: int) -> pl.Trainer:
    return quiet_trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        **length,  # type: ignore[arg-type]
        use_distributed_sampler=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )


def loader(width: int, num_samples: int = 16) -> DataLoader:
    return DataLoader(torch.randn(num_samples, width, generator=torch.Generator().manual_seed(1)), 2)


def peaks(payload: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return, by number of layers, the growth of this rank's peak memory in MB: after a fit with validation, after a
    save, and after an evaluation."""
    torch.set_num_threads(1)
    width, found = payload["width"], {}
    # two layers first: this creates the connections and everything else that is created only once
    for depth in (2, *payload["depths"]):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, grown = resident_mb("VmRSS"), {}
        strategy = HolmesStrategy(num_microbatches=2, **payload.get("holmes", {"sharding": "parameters"}))
        run, module = trainer(strategy, max_steps=3), Deep(width, depth)
        run.fit(module, loader(width), loader(width))
        grown["fit"] = resident_mb("VmHWM") - before
        run.save_checkpoint(Path(payload["folder"]) / f"{depth}.ckpt")
        grown["save"] = resident_mb("VmHWM") - before
        run.validate(module, loader(width), verbose=False)
        grown["validate"] = resident_mb("VmHWM") - before
        found[depth] = grown
        del run, module, strategy
    return found


OTHERS: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp2": lambda: ModelParallelStrategy(
        data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1, process_group_backend="gloo"
    ),
}


class Losses(pl.Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


def train(
    width: int,
    depth: int,
    strategy: dict[str, Any] | str,
    epochs: int,
    resume: Path | None = None,
    save: Path | None = None,
    is_checkpointed: bool = False,
) -> dict[str, Any]:
    """Fit up to ``epochs``, two steps each, with HolmesStrategy and these arguments, or with "ddp" or "fsdp2"; resume
    from one checkpoint and save another; return the losses of the steps."""
    pl.seed_everything(3)
    losses = Losses()
    module = (ShardedDeep if strategy == "fsdp2" else Deep)(width, depth, is_checkpointed=is_checkpointed)
    made = OTHERS[strategy]() if isinstance(strategy, str) else HolmesStrategy(**strategy)
    run = trainer(made, max_epochs=epochs)
    run.callbacks.append(losses)  # type: ignore[attr-defined]
    run.fit(module, loader(width, 4), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return {"losses": losses.seen}


def export(source: Path, file: Path, **_: Any) -> dict[str, Any]:
    """Convert a checkpoint folder to one file for plain Lightning."""
    convert([str(source), str(file)])
    return {}


def bare() -> dict[str, Any]:
    """Return the memory in MB of a process that has only done its imports."""
    return {"resident": resident_mb("VmRSS")}


def main(folder: Path, rank: str) -> None:
    """In a separate process: after the imports, join a cgroup with a memory limit, call the payload's function, and
    write its result with the growth of the peak memory in MB. An optimizer "node" has no limit."""
    torch.set_num_threads(1)
    target, payload, procs = pickle.loads((folder / "payload").read_bytes())
    before = resident_mb("VmRSS")
    if rank != "node":
        Path(procs[int(rank)]).write_text(str(os.getpid()))
    found = globals()[target](**payload)
    (folder / f"result{rank}").write_bytes(pickle.dumps(found | {"grown": resident_mb("VmHWM") - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
