"""Batches that are objects, such as graphs: run whole, split by the module's own ``split_batch``, compared between stages.

Baseline: plain Lightning in one process; parameters and loss to 1e-5.
"""

import itertools
import os
from typing import Any

import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy, check


class Graphs:
    """One graph or a batch of graphs, like torch_geometric's Data and Batch: not a container, its attributes lie in a store."""

    def __init__(self, **tensors: Any) -> None:
        self.store = {"self": self, **tensors}  # torch_geometric's store refers back to its object, too

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, *args: Any, **kwargs: Any) -> "Graphs":
        for name, value in self.store.items():
            if isinstance(value, Tensor):
                self.store[name] = value.to(*args, **kwargs)
        return self

    @staticmethod
    def together(graphs: list[Any]) -> "Graphs":
        sizes = [len(g.x) for g in graphs]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        return Graphs(
            x=torch.cat([g.x for g in graphs]),
            edge_index=torch.cat([g.edge_index + o for g, o in zip(graphs, offsets, strict=True)], dim=1),
            y=torch.cat([g.y for g in graphs]),
            batch=torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes)),
            parts=graphs,
        )


def loader(*, differs: bool = False) -> Any:
    """Return a loader of batches of graphs of three to seven nodes, each batch with another number of nodes."""
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for index in range(18):
        nodes = 3 + index % 5
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        x, y = torch.randn(nodes, 4, generator=generator), torch.randn(1, generator=generator)
        graphs.append(Graphs(x=x + float(differs), edge_index=edges, y=y))
    return DataLoader(graphs, batch_size=4, collate_fn=Graphs.together)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return torch.tanh(self.own(x).index_add(0, target, self.others(x[source])))


class Network(ByGradient):
    """A network whose step changes the batch in place, as transforms do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch.x.mul_(0.5)
        for layer in self.layers:
            hidden = layer(hidden, batch.edge_index)
        pooled = torch.zeros(len(batch.y), 4).index_add(0, batch.batch, hidden)
        loss = (self.head(pooled).squeeze(-1) - batch.y).square().mean()
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Splitting(Network):
    """A network that defines ``split_batch`` and ``microbatch_weight``."""

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        bounds = [i * len(batch.parts) // num_microbatches for i in range(num_microbatches + 1)]
        return [Graphs.together(batch.parts[a:b]) for a, b in itertools.pairwise(bounds)]

    def microbatch_weight(self, batch: Any) -> int:
        return len(batch.y)


def run(strategy: Any, *, splits: bool = False, differs: bool = False) -> Any:
    """Return the final parameters and the last loss, or the refusal. ``differs``: rank 1 has other graphs."""
    torch.manual_seed(0)
    module = (Splitting if splits else Network)()
    data = loader(differs=differs and os.environ.get("RANK") == "1")
    trainer = quiet_trainer(
        strategy if isinstance(strategy, str) else HolmesStrategy(**strategy),
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=1,
    )
    try:
        trainer.fit(module, data, None if splits else data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {n: p.detach().clone() for n, p in module.named_parameters()}, float(trainer.callback_metrics["loss"])


TWO_STAGES = {"pipeline_parallel_size": 2}
ON_TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two stages": (TWO_STAGES, {}),
    "first stage loads": (TWO_STAGES | {"broadcast_batch": True}, {"differs": True}),
    "split by the module": (TWO_STAGES | {"num_microbatches": 2}, {"splits": True}),
    "not split": (TWO_STAGES | {"num_microbatches": 2}, {}),
    "other data": (TWO_STAGES, {"differs": True}),
}


def on_each_rank(_: None) -> dict[str, Any]:
    return {name: run(strategy, **more) for name, (strategy, more) in ON_TWO.items()}


pytestmark = pytest.mark.xdist_group("strategy_graphs")


def assert_equal(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_check_takes_graphs() -> None:
    batch = next(iter(loader()))
    assert check(Network(), batch, num_microbatches=1).exact
    assert check(Splitting(), batch, num_microbatches=2).exact


def test_stages_and_microbatches_are_plain_lightning_or_refused_with_a_cure() -> None:
    whole, split = run("auto"), run("auto", splits=True)
    assert_equal(run({}), whole)
    assert_equal(run({"num_microbatches": 2}, splits=True), split)
    for found in launch(2, "test_graphs:on_each_rank"):
        assert_equal(found["two stages"], whole)
        assert_equal(found["first stage loads"], whole)
        assert_equal(found["split by the module"], split)
        assert "split_batch" in found["not split"] and "num_microbatches=1" in found["not split"]
        assert_equal(found["other data"], whole)  # the first stage's, without being asked to
