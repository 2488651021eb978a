"""Fits whose gradients and activations cross between two clusters, one process each, in fewer bits."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.topology import Cluster, Host, Topology

REPLICAS, STAGES = {"pipeline_parallel_size": 1}, {"pipeline_parallel_size": 2, "num_microbatches": 2}
ROWS: dict[str, dict[str, Any]] = {
    "replicas, exact": REPLICAS,
    "replicas, rounded": REPLICAS | {"compression": "bf16"},
    "stages, exact": STAGES,
    "stages, rounded": STAGES | {"compression": "bf16"},
}


class Net(LightningModule):
    """A few layers, trained by SGD: the differences of weights are those of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden, target = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.mse_loss(hidden, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*(torch.randn(64, 16, generator=generator).tanh() for _ in range(2)))
        given = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        parts, part = given["num_replicas"], given["rank"]
        return DataLoader(data, batch_size=8 // parts, sampler=range(part, len(data), parts))


def train_all(_: Any) -> dict[str, dict[str, Tensor]]:
    """Return the weights of each row's fit."""
    return {name: train(options) for name, options in ROWS.items()}


def train(options: dict[str, Any]) -> dict[str, Tensor]:
    """Train for eight steps in this process, together with the other process."""
    seed_everything(3, verbose=False)
    clusters = tuple(Cluster(name=name, hosts=(Host(name=name, devices=1),)) for name in ("a", "b"))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HolmesStrategy(topology=Topology(clusters=clusters), **options),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
