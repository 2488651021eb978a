"""The worker that runs on every host of a testbed: an ordinary Trainer with strategy="holmes"; writes its results as JSON.

python training_worker.py FOLDER '{"num_nodes": 4, "strategy": {}}'     # the strategy's arguments; null: only the name
"""

import json
import os
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_holmes import HolmesStrategy

STEPS, FEATURES, ROWS = 6, 320, 64


class Stack(LightningModule):
    """Equal layers, which a pipeline can split anywhere, and a head."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(num_layers))
        self.head = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden, target = batch
        for layer in self.layers:
            hidden = layer(hidden)
        loss = nn.functional.mse_loss(self.head(hidden).mean(dim=1), target)
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of 12 samples per step in their order: Lightning's own sampler would shuffle them."""
        generator = torch.Generator().manual_seed(1)
        count = STEPS * 12
        data = TensorDataset(
            torch.randn(count, ROWS, FEATURES, generator=generator), torch.randn(count, 1, generator=generator)
        )
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)
        return DataLoader(data, batch_size=12 // kwargs["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def settled_counters() -> dict[str, int]:
    """Return the bytes sent by each interface, once the shaped queues are empty."""
    counters: dict[str, int] = {}
    for _ in range(100):
        now = {name: count.bytes_sent for name, count in psutil.net_io_counters(pernic=True).items()}
        if now == counters:
            break
        counters = now
        time.sleep(0.03)
    return counters


def listen_and_tell(ports: list[int]) -> None:
    """Append to ``ports`` the port of each listener that is opened in Python from now on, as all of the package's
    listeners are, except for the store's port, which the launcher names."""
    listen = socket.socket.listen

    def noting(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        store = int(os.environ.get("MASTER_PORT", 0))
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.getsockname()[1] != store:
            ports.append(self.getsockname()[1])

    socket.socket.listen = noting  # type: ignore[method-assign]


class Watch(Callback):
    """Records the losses of the steps, the bytes sent by each interface from the second step on, and the peers
    connected after the last.

    The store, which every rank connects to, is not counted.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.listening: list[int] = []
        self.peers: list[str] = []
        self.before: dict[str, int] = {}
        self.sent: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if len(self.losses) == 1:
            self.before = settled_counters()
        elif len(self.losses) == STEPS:
            self.sent = {name: count - self.before[name] for name, count in settled_counters().items()}
            store = int(os.environ.get("MASTER_PORT", 0))
            for end in psutil.Process().net_connections(kind="tcp"):
                if end.status == psutil.CONN_LISTEN and end.laddr.port != store:
                    self.listening.append(end.laddr.port)
                elif end.status == psutil.CONN_ESTABLISHED and store not in (end.laddr.port, end.raddr.port):
                    self.peers.append(end.raddr.ip)


def train(**options: Any) -> tuple[Trainer, Watch]:
    """Train with 12 samples per step."""
    seed_everything(3)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
        **options,
    )
    trainer.fit(Stack())
    return trainer, watch


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write this rank's results."""
    opened: list[int] = []
    listen_and_tell(opened)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy: str | HolmesStrategy = "holmes"
        if options["strategy"] is not None:
            strategy = HolmesStrategy(timeout=timedelta(seconds=options.get("timeout_s", 300)), **options["strategy"])
        trainer, watch = train(strategy=strategy, devices=1, num_nodes=options["num_nodes"])
    trainer.save_checkpoint(folder / "run.ckpt")
    assert isinstance(trainer.strategy, HolmesStrategy)
    plan = trainer.strategy.plan
    mesh = trainer.strategy.device_mesh
    found = {
        "rank": trainer.global_rank,
        "losses": watch.losses,
        "sent": watch.sent,
        "grid": [list(row) for row in plan.placement.grid],
        "clusters": list(plan.clusters),
        "groups": [[g.axis, list(g.ranks), g.transport, g.reason] for g in plan.groups],
        "notes": list(plan.notes),
        "opened": opened,
        "listening": watch.listening,
        "peers": sorted(set(watch.peers)),
        "layers": list(plan.partition.layer_counts),
        "rows": [plan.rank_of(stage) for stage in range(plan.partition.num_stages)],
        "num_microbatches": plan.num_microbatches,
        "mesh": [list(mesh.mesh_dim_names or ()), mesh.get_coordinate()],
        "weights": float(sum(p.detach().double().abs().sum() for p in trainer.lightning_module.parameters())),
        "warnings": [str(w.message) for w in caught if "Ethernet" in str(w.message)],
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


def join_as_torchrun_would() -> None:
    """Set torchrun's variables for one process per host: torchrun is not started, since its own imports take long."""
    node, nodes = os.environ["NODE_RANK"], os.environ["NUM_NODES"]
    os.environ |= {"RANK": node, "GROUP_RANK": node, "WORLD_SIZE": nodes, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"


if __name__ == "__main__":
    if "RANK" not in os.environ:
        join_as_torchrun_would()
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
