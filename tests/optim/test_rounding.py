"""Fits with fewer bits between clusters: weights near those of an exact fit, and not equal, since then nothing would be
rounded; and the same on both ranks."""

from typing import Any

import pytest
import torch
from launch import launch
from lightning.pytorch import seed_everything
from quiet import quiet_trainer
from tanh_net import TanhNet, dealt
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.comm.collectives import COMPRESSIONS, sum_rounded

REPLICAS, STAGES = {"pipeline_parallel_size": 1}, {"pipeline_parallel_size": 2, "num_microbatches": 2}
ROWS: dict[str, dict[str, Any]] = {
    "replicas, exact": REPLICAS,
    "replicas, rounded": REPLICAS | {"compression": "bf16"},
    "stages, exact": STAGES,
    "stages, rounded": STAGES | {"compression": "bf16"},
}


class Net(TanhNet):
    """A few layers, trained by SGD: the differences of weights are those of the gradients."""

    def __init__(self) -> None:
        super().__init__(*(16,) * 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*(torch.randn(64, 16, generator=generator).tanh() for _ in range(2)))
        return dealt(data, 8, self.trainer)


def train_all(_: Any) -> dict[str, dict[str, Tensor]]:
    """Return the weights of each row's fit."""
    return {name: train(options) for name, options in ROWS.items()}


def train(options: dict[str, Any]) -> dict[str, Tensor]:
    """Train for eight steps in this process, together with the other process."""
    seed_everything(3, verbose=False)
    clusters = tuple(Cluster(name=name, hosts=(Host(name=name, devices=1),)) for name in ("a", "b"))
    strategy = HolmesStrategy(topology=Topology(clusters=clusters), **options)
    trainer = quiet_trainer(strategy, devices=2, max_epochs=1, use_distributed_sampler=False)
    module = Net()
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_rounded_fits_train_nearly_alike() -> None:
    ranks = launch(2, "test_rounding:train_all", None, timeout_s=150)
    for name in ROWS:
        exact = ranks[0][f"{name.split(',')[0]}, exact"]
        for found in ranks:
            for key, value in found[name].items():
                torch.testing.assert_close(value, exact[key], rtol=0, atol=5e-3, msg=f"{name}: {key}")
                assert torch.equal(value, ranks[0][name][key]), (name, key)
        same = all(torch.equal(value, exact[key]) for key, value in ranks[0][name].items())
        assert same == name.endswith("exact"), name


@pytest.mark.parametrize("dtype", COMPRESSIONS.values())
def test_what_is_as_narrow_is_summed_as_it_is(dtype: torch.dtype) -> None:
    summed: list[torch.Tensor] = []
    for tensor in (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1 / 3)):
        sum_rounded(tensor, dtype, summed.append)
    assert summed[0].dtype == torch.bfloat16 and summed[1].dtype == dtype
    assert tensor.tolist() == summed[1].tolist() != [1 / 3] * 3
