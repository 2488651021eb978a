"""The code that the step-time benchmarks run in their processes: plain, staged and bare loops, in turn."""

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, Dataset

import lightning_holmes
from recipes.gpt import GPT

SEQUENCE = 128
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


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
    trainer = Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        max_steps=steps + skip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[marks],
    )
    trainer.fit(module, DataLoader(Windows(batch_size * (steps + skip)), batch_size=batch_size))
    return marks.seconds(skip)


def build(hidden_size: int, num_layers: int) -> GPT:
    seed_everything(0)
    return GPT(hidden_size=hidden_size, num_layers=num_layers, num_heads=4, sequence_length=SEQUENCE)


def one_process(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of every step of plain Lightning and of the strategy, in turn, in this process, on a CPU or
    ``options["accelerator"]``."""
    found: dict[str, list[float]] = {"plain": [], "holmes": []}
    for turn in range(options["rounds"]):
        order = ["plain", "holmes"] if turn % 2 == 0 else ["holmes", "plain"]
        for name in order:
            strategy = lightning_holmes.HolmesStrategy() if name == "holmes" else "auto"
            module = build(options["hidden_size"], options["num_layers"])
            accelerator = options.get("accelerator", "cpu")
            found[name] += train(module, strategy, 1, options["batch_size"], options["steps"], 4, accelerator)
    return found


def two_replicas(options: dict[str, int]) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank, with DDP and with the strategy without a pipeline, in turn."""
    found: dict[str, list[float]] = {"ddp": [], "holmes": []}
    for turn in range(options["rounds"]):
        order = ["ddp", "holmes"] if turn % 2 == 0 else ["holmes", "ddp"]
        for name in order:
            strategy = (
                DDPStrategy(process_group_backend="gloo")
                if name == "ddp"
                else lightning_holmes.HolmesStrategy(pipeline_parallel_size=1)
            )
            module = build(options["hidden_size"], options["num_layers"])
            found[name] += train(module, strategy, 2, options["batch_size"], options["steps"], 4)
    return found


def layered_in_turn(options: dict[str, int]) -> dict[str, list[float]]:
    """Return the processor seconds of a step, as the median of each run, in alternating order: all layers in one
    stage; and each layer in its own stage, which runs all microbatches before the next stage. Both use the same
    microbatches, everything resident, in one process. With ``bare``, the same in plain torch. The first steps, which
    allocate the memory of all microbatches, are not counted. malloc options keep this memory: glibc may otherwise
    return it to the system after each step and fault it in again, up to 0.09 s of 2.8 s; in a running process mallopt
    replaces MALLOC_TRIM_THRESHOLD_."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 32 << 20) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    found: dict[str, list[float]] = {"one stage": [], "layered": []}
    found |= {"bare one stage": [], "bare layered": []} if options["bare"] else {}
    settings: dict[str, Any] = {"pipeline_parallel_size": 1, "num_microbatches": options["num_microbatches"]}
    for turn in range(options["pairs"]):
        for name in list(found) if turn % 2 == 0 else list(found)[::-1]:
            module = build(options["hidden_size"], options["num_layers"])
            layered = name.endswith("layered")
            if name.startswith("bare"):
                steps = bare_order(module, options, layered=layered)
            else:
                strategy = lightning_holmes.HolmesStrategy(**settings, schedule="breadth_first" if layered else "1f1b")
                steps = train(module, strategy, 1, options["batch_size"], options["steps"], 4, clock=time.process_time)
            found[name].append(statistics.median(steps))
    return found


def bare_order(gpt: GPT, options: dict[str, int], *, layered: bool) -> list[float]:
    """Return the processor seconds of each step in plain torch: microbatch by microbatch, or layer by layer, where
    each layer has its own backward."""
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    microbatches = Windows(options["batch_size"]).tokens.chunk(options["num_microbatches"])
    stages = [[layer] for layer in gpt.layers] if layered else [list(gpt.layers)]
    last = len(stages) - 1

    def run(group: list[int]) -> None:
        given: dict[tuple[int, int], Tensor] = {}
        made: dict[tuple[int, int], Tensor] = {}
        for stage, index in itertools.product(range(len(stages)), group):
            if stage == 0:
                hidden = gpt.embedding(microbatches[index][:, :-1])
            else:
                hidden = given[stage, index] = made[stage - 1, index].detach().requires_grad_()
            cos, sin = gpt.rotary(SEQUENCE, hidden.device)
            for layer in stages[stage]:
                hidden = layer(hidden, cos, sin)
            if stage == last:
                logits = gpt.head(gpt.norm(hidden)).flatten(0, 1)
                hidden = nn.functional.cross_entropy(logits, microbatches[index][:, 1:].flatten())
            made[stage, index] = hidden
        for stage, index in itertools.product(reversed(range(len(stages))), group):
            gradient = torch.tensor(1 / len(microbatches)) if stage == last else given.pop((stage + 1, index)).grad
            made.pop((stage, index)).backward(gradient)

    seconds = []
    for _ in range(options["steps"] + 4):
        start = time.process_time()
        optimizer.zero_grad()
        everyone = list(range(len(microbatches)))
        for group in [everyone] if layered else [[index] for index in everyone]:
            run(group)
        optimizer.step()
        seconds.append(time.process_time() - start)
    return seconds[4:]


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

    found: dict[str, list[float]] = {"bare": [], "holmes": []}
    microbatches = options["num_microbatches"]
    for turn in range(options["rounds"]):
        for name in ["holmes", "bare"] if turn % 2 == 0 else ["bare", "holmes"]:
            if name == "holmes":
                strategy = lightning_holmes.HolmesStrategy(pipeline_parallel_size=2, num_microbatches=microbatches)
                module = build(options["hidden_size"], options["num_layers"])
                times = train(module, strategy, 2, options["batch_size"], options["steps"], 4)
            else:
                times = bare_loop(options, dist.get_rank(), microbatches)
            found[name] += times
    return found


def monitored_in_turn(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of the batches of one run, every second one recorded by the strategy's clock."""
    seconds: dict[str, list[float]] = {"holmes": [], "plain": []}

    class InTurn(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2:
                trainer.strategy.start_monitoring()
            else:
                trainer.strategy.stop_monitoring()
            self.began = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            taken = time.perf_counter() - self.began
            if batch_idx >= 4:
                seconds["holmes" if batch_idx % 2 else "plain"].append(taken)

    seed_everything(1, verbose=False)
    module = GPT(hidden_size=options["hidden_size"], num_layers=options["num_layers"], sequence_length=SEQUENCE)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_holmes.HolmesStrategy(
            pipeline_parallel_size=2, num_microbatches=options["num_microbatches"]
        ),
        max_steps=options["steps"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[InTurn()],
    )
    windows = Windows(options["batch_size"] * options["steps"])
    trainer.fit(module, DataLoader(windows, batch_size=options["batch_size"]))
    return seconds
