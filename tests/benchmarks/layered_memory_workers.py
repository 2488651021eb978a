"""What the tests of the memory of parameters in shards run in their processes: a deep module of equal layers, built without memory."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy

STATES = 4
"""Parameters, gradients, and the two moments of Adam: as many times the bytes of the parameters."""


class Block(nn.Module):
    """A product beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Deep(pl.LightningModule):
    """Equal layers and nothing else, in which a batch of one sample has hardly any activations."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.ModuleList(Block(self.width) for _ in range(self.depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden)
        loss = hidden.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


def trainer(strategy: Any, steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loader(width: int) -> DataLoader:
    return DataLoader(torch.randn(16, width, generator=torch.Generator().manual_seed(1)), 2)


def rss_mb(field: str) -> float:
    """A line of /proc/self/status in MB: VmRSS now, VmHWM at its highest since it was reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def peaks(payload: dict[str, Any]) -> dict[int, dict[str, float]]:
    """By number of layers, the growth of this rank's peak memory, MB: while it trains, with validation; saves; and tests afterwards."""
    torch.set_num_threads(1)
    width, found = payload["width"], {}
    for depth in (2, *payload["depths"]):  # two layers first: what is connected and made only once
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, grown = rss_mb("VmRSS"), {}
        strategy = HolmesStrategy(sharded_parameters=True, num_microbatches=2, **payload.get("holmes", {}))
        run, module = trainer(strategy, 3), Deep(width, depth)
        run.fit(module, loader(width), loader(width))
        grown["fit"] = rss_mb("VmHWM") - before
        run.save_checkpoint(Path(payload["folder"]) / f"{depth}.ckpt")
        grown["save"] = rss_mb("VmHWM") - before
        run.validate(module, loader(width), verbose=False)
        grown["validate"] = rss_mb("VmHWM") - before
        found[depth] = grown
        del run, module, strategy
    return found
