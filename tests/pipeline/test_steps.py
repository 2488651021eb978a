"""One batch through the driver: split, weighted, seeded, compared between stages, with its results on every rank."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_holmes.checking import first_step, simulated_pipeline
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.request import StepRequest, StepResult
from lightning_holmes.plan.partition import make_partition


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("samples", float(len(batch)))
        x = batch
        for layer in self.layers:
            x = self.drop(layer(x))
        loss = x.square().mean()
        self.log("loss", loss)
        return {"loss": loss, "rows": x.detach()}


@contextmanager
def ranks_of(module: LightningModule, size: int, batch: Any, schedule: str = "1f1b"):
    splitter = BatchSplitter()
    with first_step.attached(module):
        structure = simulated_pipeline._structure({"training_step": module}, batch, "auto", splitter)
        partition = make_partition("uniform", structure.num_layers, size)
        yield simulated_pipeline._SimulatedPipeline(module, structure, partition, size, schedule, 1, splitter).drivers


def run(drivers: Sequence[Any], batches: Sequence[Any], num_microbatches: int, **changes: Any) -> list[StepResult]:
    """Run a training step on all ranks in turn; the last driver keeps the weights that it saw in ``seen_weights``."""

    def scales(weights: Sequence[float]) -> Callable[[], list[float]]:
        drivers[-1].seen_weights = list(weights)
        return lambda: [weight / sum(weights) for weight in weights]

    about: dict[str, Any] = {
        "step_name": "training_step",
        "arguments": (0,),
        "num_microbatches": num_microbatches,
        "seed": 5,
        "context": nullcontext,
        "loss_scales": scales,
    }
    steps = {
        rank: driver.run_in_turn(StepRequest(batch=batch, **(about | changes)))
        for rank, (driver, batch) in enumerate(zip(drivers, batches, strict=True))
    }
    results: dict[int, StepResult] = {}
    for _ in range(10_000):
        for rank in list(steps):
            try:
                next(steps[rank])
            except StopIteration as end:
                results[rank] = end.value
                del steps[rank]
        if not steps:
            return [results[rank] for rank in range(len(drivers))]
    raise AssertionError("the ranks wait for each other for ever")


def copies(batch: Any, size: int) -> list[Any]:
    return [batch.clone() for _ in range(size)]


def test_every_rank_has_the_outputs_and_logs_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    batch = torch.randn(7, 4)
    with ranks_of(Net(), 2, batch) as drivers:
        results = run(drivers, copies(batch, 2), 4)
    assert drivers[-1].seen_weights == [2.0, 2.0, 2.0, 1.0], "seven samples in four uneven microbatches"
    for result in results:
        assert torch.equal(result.output["rows"], results[-1].output["rows"]) and len(result.output["rows"]) == 7
        logged = {call.name: float(call.value) for call in result.calls}
        assert logged["samples"] == pytest.approx((2 * 2 + 2 * 2 + 2 * 2 + 1 * 1) / 7), "weighted by samples"
        assert logged["loss"] == pytest.approx(float(result.output["loss"]))


def test_random_numbers_do_not_depend_on_the_number_of_stages() -> None:
    torch.manual_seed(0)
    batch, losses = torch.randn(8, 4), []
    for size in (1, 2, 4):
        torch.manual_seed(1)
        with ranks_of(Net(), size, batch) as drivers:
            before = torch.get_rng_state()
            losses.append(float(run(drivers, copies(batch, size), 4)[0].output["loss"]))
            assert torch.equal(torch.get_rng_state(), before), "what a step draws does not disturb the data loaders"
    assert losses[0] == losses[1] == losses[2]


def test_replicas_draw_other_numbers_as_microbatches_of_one_do() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 4)
    with ranks_of(Net(), 1, batch) as drivers:
        whole = run(drivers, [torch.cat([batch, batch])], 2)[0].output["rows"]
        apart = [run(drivers, [batch.clone()], 1, replica=replica)[0].output["rows"] for replica in (0, 1)]
    assert torch.equal(whole, torch.cat(apart)) and not torch.equal(*apart)


def test_unequal_batches_are_refused_with_the_cure() -> None:
    batch = torch.randn(4, 4)
    refusal = r"pipeline rank 1 has another batch.*broadcast_batch=True"
    with ranks_of(Net(), 2, batch) as drivers, pytest.raises(ConfigurationError, match=refusal):
        run(drivers, [batch, batch + 1], 2)


def test_the_first_ranks_batch_counts_where_it_is_broadcast() -> None:
    batch = torch.randn(4, 4)
    with ranks_of(Net(), 2, batch) as drivers:
        for driver in drivers:
            driver.broadcast_batch = True
        expected = run(drivers, copies(batch, 2), 2)[0].output["rows"]
        assert torch.equal(run(drivers, [batch, torch.zeros(4, 4)], 2)[1].output["rows"], expected)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_impossible_weights_are_named(weight: float) -> None:
    class Weighted(Net):
        def microbatch_weight(self, batch: Tensor) -> float:
            return weight

    batch = torch.randn(4, 4)
    with (
        ranks_of(Weighted(), 1, batch) as drivers,
        pytest.raises(ConfigurationError, match=r"Weighted\.microbatch_weight gave"),
    ):
        run(drivers, [batch], 2)


def test_a_modules_own_weights_and_parts_are_used() -> None:
    class Own(Net):
        def microbatch_weight(self, batch: Tensor) -> float:
            return float(batch[0, 0])

        def split_batch(self, batch: Tensor, count: int) -> list[Tensor]:
            return [batch[:1], batch[1:]]

    batch = torch.tensor([[3.0, 0, 0, 0], [5.0, 0, 0, 0], [9.0, 0, 0, 0]])
    with ranks_of(Own(), 2, batch) as drivers:
        run(drivers, copies(batch, 2), 2)
        assert drivers[-1].seen_weights == [3.0, 5.0]
        with pytest.raises(ConfigurationError, match="split_batch returned 2 parts of a batch, not 3"):
            run(drivers, copies(batch, 2), 3)


def test_a_batch_with_fewer_samples_than_microbatches_makes_fewer() -> None:
    batch = torch.randn(2, 4)
    with ranks_of(Net(), 2, torch.randn(4, 4)) as drivers:
        run(drivers, copies(batch, 2), 4)
    assert drivers[-1].seen_weights == [1.0, 1.0]
