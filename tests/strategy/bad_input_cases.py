"""Mistakes of users, run one after the other in the same processes: each must raise the same error on every rank."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_cases import Block, Classifier, Setting, build, samples
from tanh_net import ByGradient
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import lightning_holmes.strategy.agreement
from lightning_holmes.errors import UnsupportedModuleError

RANK = int(os.environ.get("RANK", "0"))


class NoList(ByGradient):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.second(self.first(batch[0])), batch[1])


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters(), 0.1), torch.optim.Adam(self.blocks.parameters(), 0.1)], []


class BuiltWithoutMemory(Classifier):
    """A module with a layer from configure_model, which has no values before the first batch."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads

    def configure_model(self) -> None:
        self.more = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.more(x))

    def on_fit_start(self) -> None:
        if self.reads == "in a hook":
            self.norm = self.more.weight.norm()

    def on_train_start(self) -> None:
        if self.reads == "to save":
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "early.ckpt")

    def configure_optimizers(self) -> Any:
        if self.reads == "for the optimizer":
            return torch.optim.SGD([p for p in self.parameters() if p.abs().sum() > 0], lr=0.1)
        return super().configure_optimizers()


class NeverReaches(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x))


class PassesTwice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), self(batch[0] * 2))


class Bypasses(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.blocks[0](self.stem(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first)


class Reentrant(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class OtherShape(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Block() if RANK == 0 else nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


class OtherDropout(Classifier):
    """A module that differs between ranks in a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(Block(), nn.Dropout(0.1 * RANK))


class Reads(pl.Callback):
    """Reads the gradients in on_train_batch_end, after the optimizer has used them."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen = [p.grad for p in pl_module.parameters()]


class ReadsStates(pl.Callback):
    """Reads AdamW's states, as users do to log them."""

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        if self.copies:
            self.seen = optimizer.state_dict()
        else:
            self.seen = [optimizer.state[p]["exp_avg"].norm() for p in pl_module.parameters()]


class Grows(pl.Callback):
    """Adds to the optimizer a layer that the module did not have before."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.late = nn.Linear(2, 2)
        trainer.optimizers[0].add_param_group({"params": list(pl_module.late.parameters())})


class Quiet(pl.Callback):
    """A callback that is added on rank 0 only, as users do with callbacks that print."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps = trainer.global_step


def _on_rank_0(setting: Setting, callback: pl.Callback) -> None:
    _fit(setting, trainer={"callbacks": [callback] if RANK == 0 else []})


class ByTheWholeNorm(torch.optim.SGD):
    """Divides each step by the gradient norm over all of its parameters."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else 1.0
        for gradient in gradients:
            gradient /= norm
        return super().step(closure)


class CoupledOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return ByTheWholeNorm(self.parameters(), lr=0.1)


class LogsOnOneRank(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("loss", loss)
        return loss


def _logged(setting: Setting) -> None:
    """Log under ``is_global_zero``: in a step it is true on the stage that runs the step's end, though that is not rank 0."""
    _fit(setting, LogsOnOneRank)
    assert setting.current is not None and "loss" in setting.current.callback_metrics
    assert setting.current.global_rank == RANK, "outside of steps ranks are what they are"


class HidesMetric(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"loss": torchmetrics.MeanMetric()}


class GathersInStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.all_gather(loss)
        return loss


def _fit(
    setting: Setting, module: Any = Classifier, data: Any = None, trainer: dict[str, Any] | None = None, **holmes: Any
) -> None:
    setting.holmes = {"pipeline_parallel_size": 2, "num_microbatches": 2} | holmes
    model = build(module) if isinstance(module, type) else module()
    setting.trainer(**({"max_epochs": 1} | (trainer or {}))).fit(model, data or DataLoader(samples(), 8))


class InTwoGroups(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.blocks.parameters()}], 0.1)


class Deeper(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head, nn.Linear(3, 3))


def _resume(setting: Setting, module: Any, **holmes: Any) -> None:
    """Go on with another module from the checkpoint of a fit."""
    _fit(setting, trainer={"max_steps": 1}, **holmes)
    trainer, path = setting.current, setting.folder / "other.ckpt"
    assert trainer is not None
    trainer.save_checkpoint(path)
    setting.trainer(max_epochs=2).fit(build(module), DataLoader(samples(), 8), ckpt_path=path)


def _topology(setting: Setting, text: str) -> None:
    path = setting.folder / f"topology{RANK}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _fit(setting, topology=str(path))


def _other_version(setting: Setting) -> None:
    own = lightning_holmes.strategy.agreement.__version__
    lightning_holmes.strategy.agreement.__version__ = own if RANK == 0 else "0.0.1"
    try:
        _fit(setting)
    finally:
        lightning_holmes.strategy.agreement.__version__ = own


_GOOD = "clusters:\n  - name: a\n    hosts:\n      - {name: x, devices: 1}\n"

# name: (the function that makes the mistake, words that the error must contain)
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no layer list": (lambda s: _fit(s, NoList), ("NoList", "nn.ModuleList", "pipeline_parallel_size=1")),
    "wrong name": (lambda s: _fit(s, layers="model.layers"), ("model.layers", "blocks (4 layers", "M parameters")),
    "no list by that name": (lambda s: _fit(s, layers="stem"), ("stem", "Linear", "blocks (4 layers")),
    "too few layers": (lambda s: _fit(s, num_chunks=3), ("4", "6", "stages")),
    "not divisible": (lambda s: _fit(s, pipeline_parallel_size=3), ("pipeline_parallel_size=3", "2")),
    "partition": (lambda s: _fit(s, partition=[3, 2]), ("[3, 2]", "5", "4")),
    "partition with a bare stage": (
        lambda s: _fit(s, partition=[0, 4]),
        ("[0, 4]", "stage 0 has 0 layers", "at least 1"),
    ),
    "partition of three": (lambda s: _fit(s, partition=[1, 1, 2]), ("[1, 1, 2]", "3", "2")),
    "schedule": (lambda s: _fit(s, schedule="dualpipe"), ("dualpipe", "1f1b", "interleaved_1f1b")),
    "microbatches": (lambda s: _fit(s, num_microbatches=9), ("num_microbatches=9", "8")),
    "manual": (lambda s: _fit(s, Manual), ("Manual", "automatic_optimization")),
    "two optimizers": (
        lambda s: _fit(s, TwoOptimizers),
        ("TwoOptimizers", "several optimizers", "a parameter group for each"),
    ),
    "compiled": (lambda s: _fit(s, lambda: torch.compile(build())), ("avoid passing in compiled model",)),
    "never reaches": (lambda s: _fit(s, NeverReaches), ("NeverReaches", "blocks", "never")),
    "passes twice": (lambda s: _fit(s, PassesTwice), ("PassesTwice", "twice")),
    "bypass": (lambda s: _fit(s, Bypasses, partition="uniform"), ("blocks", "layer 0", "after the last layer")),
    "reentrant": (lambda s: _fit(s, Reentrant), ("Reentrant", "use_reentrant=False")),
    "topology key": (lambda s: _topology(s, _GOOD + "colour: red\n"), ("colour", "line 5")),
    "topology value": (lambda s: _topology(s, _GOOD.replace("devices: 1", "devices: -1")), ("devices", "-1", "line 4")),
    "topology size": (lambda s: _topology(s, _GOOD), ("has 1 devices", "the world size is 2")),
    "topology missing": (lambda s: _fit(s, topology="nowhere.yaml"), ("nowhere.yaml",)),
    "other arguments": (lambda s: _fit(s, num_microbatches=2 + RANK), ("num_microbatches", "rank 0", "rank 1")),
    "other pipeline size": (
        lambda s: _fit(s, pipeline_parallel_size=2 - RANK),
        ("pipeline_parallel_size", "rank 0", "rank 1"),
    ),
    "other monitor": (lambda s: _fit(s, monitor=RANK == 0), ("monitor", "True on rank 0", "False on rank 1")),
    "other timeout": (lambda s: _fit(s, timeout=timedelta(minutes=20 + RANK)), ("timeout", "1200", "1260", "rank 1")),
    "other version": (_other_version, ("lightning_holmes", "0.0.1", "rank 1")),
    "other module": (lambda s: _fit(s, OtherShape), ("blocks.1", "rank 0", "rank 1")),
    "other dropout": (lambda s: _fit(s, OtherDropout), ("blocks.1.1", "Dropout(p=0.0", "Dropout(p=0.1", "rank 1")),
    "other class": (lambda s: _fit(s, Classifier if RANK == 0 else Reentrant), ("Classifier", "Reentrant")),
    "metric in a dict": (lambda s: _fit(s, HidesMetric), ("MeanMetric in self.metrics.loss", "ModuleDict")),
    "collective in a step": (lambda s: _fit(s, GathersInStep), ("all_gather", "epoch-end")),
    "a hook on one rank": (lambda s: _on_rank_0(s, Quiet()), ()),
    "gradients after a sharded step": (
        lambda s: _fit(s, pipeline_parallel_size=1, sharding="optimizer", trainer={"callbacks": [Reads()]}),
        ("Reads.on_train_batch_end", "stem.weight", "on_before_optimizer_step", 'sharding="none"'),
    ),
    "values before their time": (
        lambda s: _fit(s, lambda: build(BuiltWithoutMemory, "in a hook")),
        ("BuiltWithoutMemory.on_fit_start reads more.weight", "on_before_zero_grad", "__init__"),
    ),
    "values for the optimizer": (
        lambda s: _fit(s, lambda: build(BuiltWithoutMemory, "for the optimizer")),
        ("BuiltWithoutMemory.configure_optimizers reads more.weight", "__init__"),
    ),
    "saved before its time": (
        lambda s: _fit(s, lambda: build(BuiltWithoutMemory, "to save")),
        ("BuiltWithoutMemory", "cannot be saved", "on_before_zero_grad", "__init__"),
    ),
    "parameters in shards": (
        lambda s: _fit(s, pipeline_parallel_size=1, sharding="parameters", trainer={"callbacks": [Reads()]}),
        ("Reads.on_train_batch_end reads the gradient of stem.weight", 'sharding="none"'),
    ),
    "states of an optimizer": (
        lambda s: _fit(s, trainer={"callbacks": [ReadsStates()]}),
        ("ReadsStates.on_train_batch_end reads the state of AdamW", "checkpoint", "pipeline_parallel_size=1"),
    ),
    "a copy of its states": (
        lambda s: _fit(s, pipeline_parallel_size=1, sharding="optimizer", trainer={"callbacks": [ReadsStates(True)]}),
        ("ReadsStates.on_train_batch_end reads the state of AdamW", 'sharding="none"'),
    ),
    "a layer that comes late": (
        lambda s: _fit(s, pipeline_parallel_size=1, trainer={"callbacks": [Grows()]}),
        ("group 1", "(2, 2)", "when the run began", "configure_model"),
    ),
    "coupled optimizer": (
        lambda s: _fit(s, CoupledOptimizer),
        ("ByTheWholeNorm", "depends on the other parameters of its group", "pipeline_parallel_size=1"),
    ),
    "other groups, a folder": (lambda s: _resume(s, InTwoGroups), ("this AdamW", "stem.weight, stem.bias")),
    "other groups, a file": (
        lambda s: _resume(s, InTwoGroups, save_distributed_checkpoint=False),
        ("[20]", "[2, 16]", "configure_optimizers"),
    ),
    "another model": (lambda s: _resume(s, Deeper), ("another model", "head.0.weight", "head.weight")),
    "logs on one rank": (_logged, ()),
    "nothing wrong": (_fit, ()),
}


def run_cases(payload: dict[str, Any]) -> dict[str, Any]:
    """Return by case the type and message of the exception (None and "" if there was none) and the case's seconds."""
    results: dict[str, Any] = {}
    for name in payload["cases"]:
        started = time.monotonic()
        setting = Setting(Path(payload["folder"]) / name.replace(" ", "_"))
        try:
            CASES[name][0](setting)
            results[name] = None, "", time.monotonic() - started
        except Exception as exception:
            results[name] = type(exception).__name__, str(exception), time.monotonic() - started
        print("CASE", name, results[name], flush=True)
    return results


# failures of one rank


class Failing(Classifier):
    """Fails at ``where`` in the third batch, on one rank only; "everywhere" raises on all ranks, "no loss" returns None."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, where: str, batch_idx: int, rank: int) -> None:
        if self.where == where and batch_idx == 2 and rank == RANK:
            if where == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError(f"planned failure: {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "everywhere":
            self.fail("everywhere", batch_idx, RANK)
        self.fail("before the layers", batch_idx, 0)
        self.fail("killed", batch_idx, 1)
        logits = self(batch[0])
        self.fail("after the layers", batch_idx, int(os.environ["WORLD_SIZE"]) - 1)
        if self.where == "no loss" and batch_idx == 2:
            return None
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation", batch_idx, 1)
        self.log("val_loss", self.loss(batch)[0])


class FailingCallback(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.fail("callback", batch_idx, 1)


class ReadsAtTheEnd(pl.Callback):
    """Reads the module after a failure, as one that saves it would."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            found = {name: value.clone() for name, value in pl_module.state_dict().items()}
            print("READ", sum(float(value.sum()) for value in found.values()), flush=True)
        except UnsupportedModuleError as refusal:
            print(f"REFUSED {refusal}", flush=True)


class FailingData(Dataset[Any]):
    def __init__(self, where: str, module: nn.Module) -> None:
        self.where, self.module = where, module

    def __len__(self) -> int:
        return 64

    def _norms(self) -> list[float]:
        return [float(parameter.detach().norm()) for parameter in self.module.parameters()]

    def __getitem__(self, index: int) -> Any:
        if self.where == "data loader" and index == 20 and RANK == 1:
            raise ZeroDivisionError("planned failure: data loader")
        if self.where == "data set that reads" and index == 20:
            self._norms()
        if self.where == "thread that reads" and index == 20:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: [torch.tensor(p) for p in self.module.parameters()]).result(timeout=60)
        x, y = samples(64)[(2 * index + RANK) % 64 if self.where == "divided data" else index]
        return (x + 1 if self.where == "different data" and index == 20 and RANK == 1 else x), y


def fail(payload: dict[str, Any]) -> None:
    """Train until the planned failure; the exception ends the process, as in a user's script."""
    where = payload["where"].removesuffix(" of one replica")
    setting = Setting(Path(payload["folder"]), {"pipeline_parallel_size": 2, "num_microbatches": 2})
    keep = ModelCheckpoint(Path(payload["folder"]) / "saved", save_on_exception=True)
    options = {"enable_checkpointing": True, "use_distributed_sampler": where != "divided data"}
    trainer = setting.trainer(callbacks=[FailingCallback(), ReadsAtTheEnd(), keep], **options)
    model = build(Failing, where)
    print("BEGINS", time.time(), flush=True)
    trainer.fit(model, DataLoader(FailingData(where, model), 8), DataLoader(samples(), 8))
