"""What a step changes, and what it does only in later batches: read by a checkpoint hook, written through ``.data``, sent to loggers.

Baseline: plain Lightning on the same batches, equal values on rank 0.
"""

import io
import random
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wandb
from launch import launch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch import Tensor, nn
from torch.distributed import barrier, get_rank
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import HolmesError

pytestmark = pytest.mark.xdist_group("later_state")


class Net(TanhNet):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []


class Saves(Net):
    """Counts samples after the layers; first only on_save_checkpoint reads the count, then the step itself, before the layers."""

    num_samples, num_late = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        left = self.num_samples / 9 + self.num_late + self.mean if batch_idx > 2 else 1.0
        loss = super().training_step(batch[0] * left, batch_idx)
        self.num_samples += len(batch[0])
        self.mean.lerp_(loss.detach(), 0.5)
        if batch_idx > 2:
            self.num_late += 1
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found += [self.num_samples, float(self.mean)]


class Meter:
    total = 0.0
    seen = torch.zeros(0)


class Data(Net):
    """Writes a buffer, and tensors too large for checksums, through ``.data``, which moves no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.last, self.meter = torch.zeros(20_000), Meter()
        self.meter.seen = torch.zeros(20_000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.layers(batch[0])
        self.mean.data.lerp_(out.detach().mean(0), 0.1)
        self.last.data[:4] = out.detach()[0]
        self.meter.seen.data = out.detach().mean().repeat(20_000)
        return out.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found += [*self.mean.tolist(), *self.last[:4].tolist(), self.meter.seen[-1].item()]


class Changes(Net):
    """Changes its batch: in place, and by a further entry, before which it may not run a second time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        batch.append(x.sub_(0.5).mul_(2))
        return self.layers(x).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found += [float(batch[0].norm()), float(outputs["loss"])]


class Switches(Net):
    """Sets all to evaluation before its layers, and back after them; from the third batch on the first layer stays so."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = 1 + sum(part.training for part in self.modules())
        self.eval()
        self.layers[1].requires_grad_(self.global_step != 3)
        loss = self.layers(factor * batch[0]).square().mean()
        self.train()
        self.layers[0].train(self.global_step < 2)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found += [sum(part.training for part in self.modules()), float(outputs["loss"])]


class Logs(Net):
    """Uses the logger from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and isinstance(self.logger, CSVLogger):
            self.logger.log_metrics({"seen": 1.0})
        return super().training_step(batch, batch_idx)


class Samples(Net):
    """Evaluation steps that draw random numbers, and take no index."""

    def validation_step(self, batch: Any) -> None:
        self.found.append(float(torch.rand(()) + 0 * self.layers(batch[0]).sum()))
        self.log("val", self.found[-1])

    def predict_step(self, batch: Any) -> Tensor:
        return self.layers(batch[0]).sum(1) * 0 + torch.rand(())


class Meets(Net):
    """Reads parameters on rank 0 only, before all ranks come to a collective."""

    def __init__(self) -> None:
        super().__init__()
        del self.found  # each rank's own, which is no state of the module
        type(self).found = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        total, strategy = torch.tensor(0.0), self.trainer.strategy
        for collective in (self.all_gather, strategy.reduce, lambda _: self.mean.compute()):
            if self.trainer.is_global_zero:
                total = torch.stack([p.detach().sum() for p in self.parameters()]).sum()
            self.found.extend(torch.as_tensor(collective(total)).flatten()[:1].tolist())
        self.found.extend(self.all_gather(self.layers[0][0].bias.detach()).flatten().tolist()[:4])


class Mines(Net):
    """Orders its data anew at each epoch, by the weights."""

    def train_dataloader(self) -> Any:
        self.found.append(float(self.layers[3][0].weight.detach().norm()))
        data = torch.randn(24, 4, generator=torch.Generator().manual_seed(int(1e6 * self.found[-1])))
        return DataLoader(TensorDataset(data), 4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


class Transfers(Net):
    """Reads the last layer while a batch is moved to the device, from the third batch on."""

    moved = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return [batch[0] * self.layers[3][0].weight.detach().norm()] if self.moved > 3 else batch


class Draws(Net):
    """Draws from a generator before the layers and after them, as mixup does."""

    rng: random.Random | None = None
    made_in = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.made_in == "step" and self.rng is None:
            self.rng = random.Random(3)
        share = 1.0 if self.rng is None else self.rng.random()
        loss = self.layers(share * batch[0]).square().mean() * share
        self.found.append(share if self.rng is None else self.rng.random())
        return loss * (1 + self.found[-1])

    def on_train_epoch_start(self) -> None:
        if self.made_in == f"epoch {self.current_epoch}":
            self.rng = random.Random(3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.made_in == "batch" and self.global_step == 3:
            self.rng = random.Random(3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


class Ranks(Net):
    """Counts on what it takes for the first rank, by each of the ways to ask for it."""

    num_counted = 0

    @rank_zero_only
    def count(self) -> None:
        self.num_counted += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count()
        self.num_counted += not dist.is_initialized() or get_rank() + dist.get_rank() + dist.get_world_size() == 1
        self.num_counted += self.local_rank == self.trainer.local_rank == 0
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(self.num_counted)


class LooksBack(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.found.append(self.layers[0][0].weight.grad is not None)


OFFSETS: Iterator[float] = iter(())


class Iterates(Net):
    """Draws from iterators that cannot be copied: before the layers from a loader's, made anew where it ends, and one of this file; after
    the layers from one in a list."""

    makes = True

    def __init__(self) -> None:
        super().__init__()
        self.loader = DataLoader(TensorDataset(torch.randn(20, 4)), 4)
        self.factors = [(value / 9 for value in range(1, 100))]
        globals()["OFFSETS"] = map(float, range(100))

    def on_train_epoch_start(self) -> None:
        self.others = iter(self.loader if self.makes else [[torch.randn(4, 4)] for _ in range(9)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            (other,) = next(self.others)
        except StopIteration:
            self.others = iter(self.loader)
            (other,) = next(self.others)
        return super().training_step([batch[0] + other + next(OFFSETS)], batch_idx) * next(self.factors[0])

    def on_train_end(self) -> None:
        self.found += [float(parameter.detach().norm()) for parameter in self.parameters()]


class Accumulates(Net):
    """Reads gradients after each batch of a window of two, in bf16: they are added up in single precision, on the rank of their stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0].bfloat16()).square().mean()

    def on_after_backward(self) -> None:
        self.found += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]


class Counts(nn.Module):
    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, loss: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean.lerp_(loss.detach(), 0.5)
        return loss


class Rows(Dataset[float]):
    def __init__(self) -> None:
        self.rows: list[float] = []


class Begins(TanhNet):
    """Does something from the fifth batch on; no hook of each batch brings what a step leaves."""

    what = ""
    num_counted = 0

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.meter, self.head, self.inner, self.kept = Meter(), Counts(), TanhNet(), Rows()
        self.tools: dict[str, Any] = {"round": lambda value: value, "last": 0.0}
        self.table, self.file = wandb.Table(["loss"]), io.StringIO()
        self.queue = Queue[int]() if self.what == "queue" else None  # which cannot be copied
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        begun = batch_idx > 3  # where no trial comes
        reads = READS[self.what](self) if begun and self.what in READS else 0.0
        if begun and self.what == "counts before":
            self.num_counted += 1
        loss = super().training_step([batch[0] * (1 + reads)], batch_idx)
        if self.what in READS:
            self.losses.append(self.head(loss).item())
            self.meter.total += loss.item()
        return DOES[self.what][0](self, loss) if begun and self.what in DOES else loss

    def count(self) -> int:
        self.num_counted += 1
        return self.num_counted

    def on_train_end(self) -> None:
        self.found += [float(parameter.detach().norm()) for parameter in self.parameters()]


READS: dict[str, Callable[[Begins], Any]] = {
    "list": lambda m: sum(m.losses),
    "object": lambda m: m.meter.total,
    "submodule": lambda m: m.head.num_calls / 9,
    "buffer below": lambda m: m.head.mean,
}
DOES: dict[str, tuple[Callable[[Begins, Tensor], Any], str]] = {
    "collective": (lambda m, loss: dist.all_reduce(loss), "Begins.training_step calls the collective all_reduce"),
    "imported": (lambda m, loss: barrier(), "Begins.training_step calls the collective barrier"),
    "backward": (
        lambda m, loss: loss.backward(),
        "Begins.training_step calls backward: a pipeline runs the backward itself",
    ),
    "autograd": (
        lambda m, loss: torch.autograd.grad(loss, m.layers[3][0].bias),
        "Begins.training_step calls torch.autograd.grad after layers have run",
    ),
    "gradient": (
        lambda m, loss: m.layers[0][0].bias.grad,
        "Begins.training_step reads .grad of a parameter: those of the batch before are gone by then",
    ),
    "metrics": (
        lambda m, loss: m.log("loss", loss) or m.trainer.callback_metrics["loss"],
        "Begins.training_step reads self.trainer.callback_metrics after a self.log of its own",
    ),
    "nested": (lambda m, loss: m.inner.log("loss", loss), "Begins.training_step logs through inner.log"),
    "data set": (lambda m, loss: m.kept.rows.append(loss.item()), "Begins.training_step changes self.kept.rows"),
    "queue": (
        lambda m, loss: loss * (m.queue.put(1) is None),
        "Begins.training_step changes self.queue.",
    ),
    "file": (lambda m, loss: loss * m.file.write("1"), "Begins.training_step changes self.file, which is not brought"),
    "table": (lambda m, loss: m.table.add_data(loss.item()), "Begins.training_step changes self.table."),
    "container": (lambda m, loss: m.tools.update(last=loss.item()), "Begins.training_step changes self.tools.last"),
    "freezes": (lambda m, loss: loss * m.layers[0].requires_grad_(False).training, "sets requires_grad of layers.0.0."),
    "counts": (lambda m, loss: loss * m.count(), "changes self.num_counted, which it did not in the first batch"),
    "counts before": (lambda m, loss: loss * m.num_counted, "it runs once for each of 2 stages on this rank"),
}
"""What a step does, and what the refusal says."""
OPTIONS: dict[str, dict[str, Any]] = {
    "changes in microbatches": {"num_microbatches": 2},
    "changes in chunks": {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 2},
    "iterates in microbatches": {"num_microbatches": 2},
    "iterates in chunks": {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 1},
    "makes iterators in chunks": {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 1},
    "counts": {"schedule": "interleaved_1f1b"},  # which takes two microbatches
    "counts before": {"schedule": "breadth_first", "num_chunks": 2, "num_microbatches": 1},
}


WARNED = {
    "counts": "changes self.num_counted, which it did not in the first batch: it runs once for each of 2",
    "data": "leaves self.last, meter.seen on the module, once for each microbatch",
}
CHANGES = ("changes", "changes in microbatches", "changes in chunks")
REFUSED = {
    "looksback": "LooksBack.on_before_zero_grad reads the gradient of layers.0.0.weight, but a pipeline has run the backward by then",
    "iterates in microbatches": "Iterates.training_step draws from self.factors.0, a generator of its own",
    "makes iterators in chunks": "Iterates.training_step makes self.others, a generator of its own",
}
DRAWS = {"draws later": "epoch 1", "draws at a batch": "batch", "draws lazily": "step"}
CASES = {
    kind.__name__.lower(): kind
    for kind in (Accumulates, Data, Iterates, LooksBack, Ranks, Logs, Meets, Mines, Samples, Saves, Switches, Transfers)
}
CASES |= dict.fromkeys(CHANGES, Changes)
CASES |= dict.fromkeys(("iterates in microbatches", "makes iterators in chunks"), Iterates)
CASES["iterates in chunks"] = type("Iterates", (Iterates,), {"makes": False})
CASES |= {name: type("Draws", (Draws,), {"made_in": place}) for name, place in DRAWS.items()}


def run(name: str, strategy: Any, devices: int, folder: str) -> list[Any] | str:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module: Any = CASES[name]() if name in CASES else type("Begins", (Begins,), {"what": name})()
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4)
    trainer = quiet_trainer(
        strategy,
        devices=devices,
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)] if name == "saves" else [],
        enable_checkpointing=name == "saves",
        logger=CSVLogger(folder) if name == "logs" else False,
        num_sanity_val_steps=0,
        precision="bf16-true" if name == "accumulates" else "32-true",
        accumulate_grad_batches=1 + (name == "accumulates"),
        reload_dataloaders_every_n_epochs=int(name == "mines"),
    )
    try:
        trainer.fit(module, None if name == "mines" else loader, loader if name == "samples" else None)
    except HolmesError as refusal:
        return str(refusal)
    if name == "samples":
        module.found += [float(batch[0]) for batch in trainer.predict(module, loader)]
    return module.found


def run_all(folder: str) -> dict[str, Any]:
    found = {}
    for name in (*CASES, *READS, *DOES):
        strategy = HolmesStrategy(pipeline_parallel_size=2, **OPTIONS.get(name, {}))
        found[name] = run(name, strategy, 2, f"{folder}/{name}")
    sharded = HolmesStrategy(pipeline_parallel_size=1, sharding="parameters")
    return found | {"meets in shards": run("meets", sharded, 2, folder)}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = launch(2, "test_later_state:run_all", str(tmp_path_factory.mktemp("staged")))[0]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "saves",
        "data",
        "switches",
        "mines",
        "ranks",
        "iterates",
        "iterates in chunks",
        *list(DRAWS)[:2],
        *READS,
        *CHANGES,
    ],
)
def test_what_a_step_leaves_is_what_hooks_read(name: str, staged: dict[str, Any], tmp_path: Path) -> None:
    plain = run(name, "auto", 1, str(tmp_path))
    assert plain and staged[name] == pytest.approx(plain, rel=1e-5)


def test_ranks_that_read_alone_come_to_a_collective_with_all_others(staged: dict[str, Any], tmp_path: Path) -> None:
    """Two replicas have other samples, and reduce to the mean: of these the number of values counts."""
    plain = run("meets", "auto", 1, str(tmp_path))
    assert staged["meets"] == pytest.approx(plain, rel=1e-5)
    assert len(staged["meets in shards"]) == len(plain) // 2 and all(map(isfinite, staged["meets in shards"]))


def test_a_hook_in_which_ranks_do_not_meet_is_refused_what_its_rank_lacks(staged: dict[str, Any]) -> None:
    assert "Transfers.on_after_batch_transfer reads layers.3.0.weight" in staged["transfers"]
    assert "read it in on_train_batch_start" in staged["transfers"]


def test_a_logger_that_is_used_from_a_later_batch_on_is_refused_by_name(staged: dict[str, Any]) -> None:
    assert "Logs.training_step uses self.logger directly (.log_metrics)" in staged["logs"]


@pytest.mark.parametrize(("name", "said"), [*((name, said) for name, (_, said) in DOES.items()), *REFUSED.items()])
def test_what_begins_in_a_later_batch_is_refused_by_name(name: str, said: str, staged: dict[str, Any]) -> None:
    assert said in staged[name]


@pytest.mark.parametrize(("name", "said"), WARNED.items())
def test_what_each_microbatch_changes_is_warned_of(name: str, said: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=said):
        run(name, HolmesStrategy(num_microbatches=2), 1, str(tmp_path))


def test_gradients_of_one_rank_are_read_between_accumulated_batches(staged: dict[str, Any], tmp_path: Path) -> None:
    """Plain Lightning adds gradients up in bf16, to three digits."""
    plain = run("accumulates", "auto", 1, str(tmp_path))
    assert len(plain) == 96 and staged["accumulates"] == pytest.approx(plain, rel=0.05)


def test_a_generator_that_a_step_makes_is_refused_by_name(staged: dict[str, Any]) -> None:
    assert "Draws.training_step makes self.rng, a generator of its own" in staged["draws lazily"]


def test_evaluation_steps_without_an_index_draw_other_numbers_in_each_batch_and_epoch(staged: dict[str, Any]) -> None:
    numbers = staged["samples"][1::2] if len(staged["samples"]) > 18 else staged["samples"]
    assert len(set(numbers)) == len(numbers) == 18
