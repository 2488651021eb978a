"""Pure data parallelism over two clusters, on every host of a testbed; rank 0 reports its progress and the chosen
collectives.

python sync_worker.py FOLDER '{"num_nodes": 4, "steps": 50, "strategy": {}}'
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_worker import join_as_torchrun_would

from lightning_holmes import HolmesStrategy

FEATURES = 128


class Columns(LightningModule):
    """A module with 100,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(6)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Progress(Callback):
    """Writes the number of finished steps to a file for the test, and records the bytes that this host had sent over
    Ethernet after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.sent.append(int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()))
        if trainer.is_global_zero:
            self.path.write_text(str(trainer.global_step))


class Choices(Callback):
    """Records rank 0's choices of collectives when training ends."""

    found: list[dict[str, Any]]

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HolmesStrategy)
        self.found = [
            {"collective": c.collective, "seconds": dict(c.seconds), "step": c.step, "reason": c.reason}
            for c in strategy.gradient_sync_choices
        ]


def main(folder: Path, options: dict[str, Any]) -> None:
    seed_everything(3)
    progress, choices = Progress(folder / "step"), Choices()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options["num_nodes"],
        strategy=HolmesStrategy(pipeline_parallel_size=1, **options["strategy"]),
        max_steps=options["steps"],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[progress, choices],
    )
    data = TensorDataset(torch.randn(8 * options["steps"], FEATURES))
    sampler: Any = DistributedSampler(data, num_replicas=options["num_nodes"], rank=0, shuffle=False)
    trainer.fit(Columns(), DataLoader(data, batch_size=2, sampler=sampler))
    found = {"choices": choices.found, "sent": progress.sent}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    join_as_torchrun_would()
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
