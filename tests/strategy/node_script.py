"""A user's script with an optimizer class of its own: trains on one process, with an optimizer node that is started elsewhere.

python node_script.py ACCELERATOR
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for what strategy_cases imports from there
from quiet import quiet_trainer
from strategy_cases import Classifier, samples


class Mine(torch.optim.SGD):
    """An optimizer class that is defined in this script only."""


class WithMine(Classifier):
    def configure_optimizers(self) -> Any:
        return Mine(self.parameters(), lr=0.1 / self.trainer.estimated_stepping_batches)


if __name__ == "__main__":
    seed_everything(7, verbose=False)
    model = WithMine()
    strategy = HolmesStrategy(optimizer_nodes=1)
    trainer = quiet_trainer(strategy, accelerator=sys.argv[1], devices=1, precision="32-true", max_epochs=1)
    trainer.validate(model, DataLoader(samples(), 8), verbose=False)
    trainer.fit(model, DataLoader(samples(), 8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(samples(), 8))
    print(f"RESULT loss={float(trainer.callback_metrics['loss']):.6f}", flush=True)
    raise SystemExit(0)
