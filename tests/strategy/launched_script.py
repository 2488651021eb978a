"""A user's script: trains with HolmesStrategy, by whichever launcher it was started, and prints what it saw.

python launched_script.py DEVICES [NODES [RANK_THAT_FAILS]]
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch.utils.data import DataLoader

import lightning_holmes  # noqa: F401
from lightning_holmes import HolmesStrategy

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for what strategy_cases imports from there
from quiet import quiet_trainer
from strategy_cases import Classifier, samples


class Fails(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == int((sys.argv[3:] or [-1])[0]):
            raise ZeroDivisionError("planned failure")


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:  # torch's own default, which a forked process does not use
        torch.set_num_threads(os.cpu_count() or 1)
    seed_everything(7, verbose=False)
    model = Classifier()
    devices, nodes = int(sys.argv[1]), int((*sys.argv, 1)[2])
    trainer = quiet_trainer(
        "holmes" if devices * nodes == 1 else HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2),
        devices=devices,
        num_nodes=nodes,
        plugins=[KubeflowEnvironment()] if "KUBERNETES_PORT" in os.environ else None,
        max_epochs=1,
        callbacks=[Fails()],
    )
    trainer.fit(model, DataLoader(samples(), 8))
    where = type(trainer.strategy.cluster_environment).__name__
    loss = float(trainer.callback_metrics["loss"])
    line = (
        f"RESULT rank={trainer.global_rank} world={trainer.world_size} environment={where} loss={loss:.6f} "
        f"threads={torch.get_num_threads()}\n"
    )
    os.write(1, line.encode())
