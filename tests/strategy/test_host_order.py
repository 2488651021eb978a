"""Hosts that the launcher numbers in another order than the topology file names them. Baseline: plain Lightning. Tolerance: 1e-5
relative."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import chosen, launch
from quiet import quiet_trainer
from tanh_net import TanhNet, dealt
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.topology import Cluster, Host, Topology

pytestmark = pytest.mark.xdist_group("host_order")
ORDER = (3, 1, 0, 2)  # the global rank of each host of the file
GIVEN: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline_parallel_size": 2, "sharding": "none"},
    "two stages, sharded optimizer": {"pipeline_parallel_size": 2, "sharding": "optimizer"},
    "two stages, sharded parameters": {"pipeline_parallel_size": 2, "sharding": "parameters"},
    "four stages": {"pipeline_parallel_size": 4},
    "replicas, sharded parameters": {"pipeline_parallel_size": 1, "sharding": "parameters"},
}


class Stack(TanhNet):
    """Layers of unlike sizes; a hook reads one parameter of each."""

    def __init__(self) -> None:
        super().__init__(5, 7, 3, 6, 5)
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch) - batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.layers[batch_idx % 4][0].weight.detach().norm()))

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(48, 5, generator=torch.Generator().manual_seed(1)))
        return dealt(data, 12, self.trainer)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(strategy: Any, devices: int) -> list[float]:
    """What the hook saw in each step, and the sum of each parameter after the fit."""
    pl.seed_everything(3, verbose=False)
    module = Stack()
    quiet_trainer(strategy, devices=devices, max_epochs=1, use_distributed_sampler=False).fit(module)
    return [*module.seen, *(float(parameter.detach().abs().sum()) for parameter in module.parameters())]


def fit(names: list[str]) -> dict[str, list[float]]:
    hosts = tuple(Host(name=f"host-{index}", devices=1, ranks=(rank,)) for index, rank in enumerate(ORDER))
    topology = Topology(clusters=(Cluster(name="a", hosts=hosts[:2]), Cluster(name="b", hosts=hosts[2:])))
    return {name: train(HolmesStrategy(topology=topology, **GIVEN[name]), len(ORDER)) for name in names}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, list[float]]]:
    return launch(len(ORDER), "test_host_order:fit", chosen(request, "name"), timeout_s=120)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train("auto", 1)


@pytest.mark.parametrize("name", GIVEN)
def test_the_order_of_hosts_changes_no_number(
    name: str, found: list[dict[str, list[float]]], plain: list[float]
) -> None:
    for of_rank in found:
        assert of_rank[name] == pytest.approx(plain, rel=1e-5), name
