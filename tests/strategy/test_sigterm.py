"""SIGTERM in mid-batch: all ranks of a pipeline end together at the next batch, none waits for ever."""

from pathlib import Path
from typing import Any

import pytest
from launch import launch_raw


def train_until_told(options: dict[str, Any]) -> None:
    """Runs in each process: the ranks named in ``options`` send themselves SIGTERM from inside their third batch."""
    import os
    import signal

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_holmes

    class Told(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and int(os.environ["RANK"]) in options["ranks"]:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            print(f"batch {batch_idx}", flush=True)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_holmes.HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Told(), DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=4))


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["first rank", "all ranks"])
def test_sigterm_ends_all_ranks_at_a_batch_boundary(ranks: list[int], tmp_path: Path) -> None:
    workers = launch_raw(2, "test_sigterm:train_until_told", {"ranks": ranks}, timeout_s=90, folder=tmp_path)
    for worker in workers:
        assert worker.exit_code is not None, "still running: " + worker.output[-2000:]
        assert "batch 2" in worker.output and "batch 10" not in worker.output
        assert "Traceback" not in worker.output or "SIGTERMException" in worker.output, worker.output[-2000:]
