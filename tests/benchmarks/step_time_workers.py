"""The code that the step-time benchmarks run in their processes: plain, staged and bare loops, in turn."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, Dataset

from lightning_holmes import HolmesStrategy
from recipes.gpt import GPT

SEQUENCE = 128


class Windows(Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 256, (count, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class StepClock(Callback):
    """Records the seconds from one training batch's start to the next one's; a GPU is synchronized first."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.marks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(self.clock())

    on_train_end = on_train_batch_start

    def seconds(self, skip: int) -> list[float]:
        return [b - a for a, b in zip(self.marks[skip:], self.marks[skip + 1 :], strict=False)]


def train(
    module: LightningModule,
    strategy: Any,
    devices: int,
    batch_size: int,
    steps: int,
    skip: int,
    accelerator: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    marks = StepClock(clock)
    trainer = quiet_trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, max_steps=steps + skip, callbacks=[marks]
    )
    trainer.fit(module, DataLoader(Windows(batch_size * (steps + skip)), batch_size=batch_size))
    return marks.seconds(skip)


def build(hidden_size: int, num_layers: int) -> GPT:
    seed_everything(0)
    return GPT(hidden_size=hidden_size, num_layers=num_layers, num_heads=4, sequence_length=SEQUENCE)


def in_turn(rounds: int, **ways: Callable[[], list[float]]) -> dict[str, list[float]]:
    """Return the seconds of every step that each of two ways returns: one after the other, and the other first in every second round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            found[name] += ways[name]()
    return found


def steps_of(options: dict[str, Any], devices: int, make_strategy: Callable[[], Any]) -> list[float]:
    module = build(options["hidden_size"], options["num_layers"])
    accelerator = options.get("accelerator", "cpu")
    return train(module, make_strategy(), devices, options["batch_size"], options["steps"], 4, accelerator)


def one_process(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of every step of plain Lightning and of the strategy, in turn, in this process, on a CPU or
    ``options["accelerator"]``."""
    return in_turn(
        options["rounds"],
        plain=lambda: steps_of(options, 1, lambda: "auto"),
        holmes=lambda: steps_of(options, 1, HolmesStrategy),
    )


def two_replicas(options: dict[str, int]) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank, with DDP and with the strategy without a pipeline, in turn."""
    return in_turn(
        options["rounds"],
        ddp=lambda: steps_of(options, 2, lambda: DDPStrategy(process_group_backend="gloo")),
        holmes=lambda: steps_of(options, 2, lambda: HolmesStrategy(pipeline_parallel_size=1)),
    )


class BareStage(nn.Module):
    """Half of a GPT as a plain module, for torch.distributed.pipelining."""

    def __init__(self, gpt: GPT, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = gpt.embedding if first else None
        self.rotary = gpt.rotary
        self.layers = nn.ModuleList([gpt.layers[i] for i in layers])
        self.norm = gpt.norm if last else None
        self.head = gpt.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        cos, sin = self.rotary(x.shape[1], x.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def bare_loop(options: dict[str, int], rank: int, num_microbatches: int) -> list[float]:
    """Return the step seconds of a loop over torch's 1F1B with the same optimizer."""
    gpt = build(options["hidden_size"], options["num_layers"])
    half = options["num_layers"] // 2
    layers = range(half) if rank == 0 else range(half, options["num_layers"])
    stage_module = BareStage(gpt, layers, rank == 0, rank == 1)
    size = options["batch_size"] // num_microbatches
    token = torch.zeros(size, SEQUENCE, dtype=torch.int64)
    hidden = torch.zeros(size, SEQUENCE, options["hidden_size"], requires_grad=True)
    logits = torch.zeros(size, SEQUENCE, 256, requires_grad=True)
    stage = PipelineStage(
        stage_module,
        rank,
        2,
        torch.device("cpu"),
        input_args=(token if rank == 0 else hidden,),
        output_args=(hidden if rank == 0 else logits,),
    )

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3)
    marks = []
    for batch in DataLoader(Windows(options["batch_size"] * (options["steps"] + 4)), batch_size=options["batch_size"]):
        marks.append(time.perf_counter())  # from one step's start to the next one's, as for the strategy
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=[])
        optimizer.step()
    marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks[4:])]


def two_stages(options: dict[str, int]) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank, of the strategy and of a bare loop, in turn."""
    import torch.distributed as dist

    staged = {"pipeline_parallel_size": 2, "num_microbatches": options["num_microbatches"]}
    return in_turn(
        options["rounds"],
        holmes=lambda: steps_of(options, 2, lambda: HolmesStrategy(**staged)),
        bare=lambda: bare_loop(options, dist.get_rank(), options["num_microbatches"]),
    )
