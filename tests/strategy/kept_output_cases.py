"""Modules that read layers' outputs again besides the hidden state, and fits of them in the processes of a test."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy

WIDTH, SAMPLES = 4, 10


class Family(pl.LightningModule):
    """Six layers; ``hidden`` runs them and the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def hidden(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.hidden(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.hidden(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class UNet(Family):
    """Skip connections from the first two layers to the last two, through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bridge = nn.Linear(WIDTH, WIDTH)

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, skips = batch, []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + self.bridge(skips.pop())) if index > 3 else layer(hidden)
            hidden = hidden.tanh()
            if index < 2:
                skips.append(hidden)
        return hidden


class ResidualOutside(Family):
    """Layers whose outputs are added in place to a residual sum outside of them."""

    def hidden(self, batch: Tensor) -> Tensor:
        hidden = batch.clone()
        for layer in self.layers:
            hidden += layer(hidden.tanh())
        return hidden


class Mixed(Family):
    """A learned mix of all layers' outputs, under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, 6))

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, found = batch, []
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False).tanh()
            found.append(hidden)
        weights = self.weights.softmax(0)
        return sum(weight * each for weight, each in zip(weights, found, strict=True))  # type: ignore[return-value]


class DeeplySupervised(Family):
    """A head that is applied to each layer's output (deep supervision)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, judged = batch, []
        for layer in self.layers:
            hidden = layer(hidden).tanh()
            judged.append(self.head(hidden))
        return torch.cat(judged, dim=-1)


class Pair(nn.Module):
    """A layer that returns a hidden state and a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        hidden, extra = self.both(hidden).tanh().chunk(2, dim=-1)
        return {"hidden": hidden, "extra": extra}


class Dense(Family):
    """Each layer returns two tensors, of which one is read by all layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(6))

    def hidden(self, batch: Tensor) -> Tensor:
        hidden, extras = batch, []
        for layer in self.layers:
            found = layer(hidden + sum(extras))
            hidden = found["hidden"]
            extras.append(found["extra"])
        return hidden


class Frozen(UNet):
    """A UNet whose first two layers, whose outputs later layers read, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)


FAMILIES: dict[str, type[Family]] = {
    each.__name__: each for each in (UNet, ResidualOutside, Mixed, DeeplySupervised, Dense, Frozen)
}


def fit(
    name: str, strategy: Any, folder: Path, *, replicas: int = 1
) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """Return parameters and logs after two epochs, each of a whole batch and a ragged one for every replica; and the strategy."""
    torch.manual_seed(3)
    module = FAMILIES[name]()
    trainer = quiet_trainer(
        strategy,
        devices=replicas,
        max_epochs=2,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(4))
    trainer.fit(module, DataLoader(data, 7), DataLoader(data, 7))  # the same on each replica: their mean is that of one
    logs = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value.clone() for key, value in module.state_dict().items()}, logs, trainer.strategy


def fit_all(folder: str) -> dict[str, Any]:
    """Fit each family with sharded parameters on two ranks; return parameters, logs and layer counts by name."""
    found = {}
    for name in FAMILIES:
        strategy = HolmesStrategy(sharding="parameters", num_microbatches=2, partition=[1] * 6)
        state, logs, strategy = fit(name, strategy, Path(folder), replicas=2)
        found[name] = state, logs, strategy.plan.partition.layer_counts
    return found
