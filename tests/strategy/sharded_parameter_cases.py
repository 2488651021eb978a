"""What two processes do with sharded parameters: fit, evaluate, save and resume, in either format, with and without shards.

Everything is compared with plain Lightning in one process on the same samples; see test_sharded_parameters.py.
"""

import contextlib
import os
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from comparing import state_of
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from quiet import quiet_trainer, saves
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import AbsentValueError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.search import SearchResult, SearchSpace, comparison, shard_search
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.strategy import sharding

BATCH, STEPS = 8, 4
OPTIMIZERS = ("adamw", "sgd", "muon")


class Block(nn.Module):
    """Two matrix products beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class Tied(pl.LightningModule):
    """Four layers between an embedding and a head that shares its weight; a frozen scale; a weight that nothing reads."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer
        self._build()

    def _build(self) -> None:
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.roll(1, -1).flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.roll(1, -1).flatten())
        self.log("val_loss", loss, sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).argmax(-1)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "muon":  # Muon takes whole matrices
            matrices = [p for name, p in self.named_parameters() if p.ndim == 2 and "layers" in name]
            return torch.optim.Muon(matrices, lr=0.02)
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        others = [p for p in trained if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in trained if p.ndim == 2]}, {"params": others, "weight_decay": 0.0}],
            lr=0.01,
            eps=1e-4,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


class Outside(Tied):
    """Residual connections outside of the layers: a layer's input is read again after it."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Counting(Tied):
    """Changes a buffer before the layers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Thawing(Tied):
    """Trains layers[1] and the scale in all batches of an epoch but the first, and layers[2] in the first only; its optimizer
    has all of them."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.layers[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for part in (self.layers[1], self.scale):
            part.requires_grad_(batch_idx > 0)
        self.layers[2].requires_grad_(batch_idx == 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Late(Counting):
    """The same model, built by configure_model: no process holds it whole."""

    def __init__(self, optimizer: str = "adamw") -> None:
        pl.LightningModule.__init__(self)
        self.optimizer, self.layers = optimizer, None

    def configure_model(self) -> None:
        if self.layers is None:
            self._build()
            self.register_buffer("seen", torch.zeros(2))


def build(optimizer: str = "adamw", kind: type[Tied] = Tied) -> Tied:
    """Make a module with the same initial weights in every process."""
    torch.manual_seed(7)
    return kind(optimizer)


class Data(pl.LightningDataModule):
    """Texts in order; a replica takes every n-th of them, n being the number of replicas."""

    def loader(self, seed: int, number: int) -> DataLoader:
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        sharing = strategy.distributed_sampler_kwargs if isinstance(strategy, HolmesStrategy) else {}
        replicas, rank = sharing.get("num_replicas", 1), sharing.get("rank", 0)
        texts = torch.randint(0, 11, (number, 6), generator=torch.Generator().manual_seed(seed))
        return DataLoader(texts[rank::replicas], batch_size=BATCH // replicas)

    def train_dataloader(self) -> DataLoader:
        return self.loader(1, BATCH * STEPS)

    def val_dataloader(self) -> DataLoader:
        return self.loader(2, BATCH * 2)

    def predict_dataloader(self) -> DataLoader:
        return self.loader(3, BATCH)


def make_trainer(folder: Path, epochs: int = 1, **strategy: Any) -> Trainer:
    """Make a trainer with HolmesStrategy of these arguments on all processes; without arguments, plain Lightning in one process."""
    return quiet_trainer(
        HolmesStrategy(**strategy) if strategy else "auto",
        devices=int(os.environ.get("WORLD_SIZE", "1")) if strategy else 1,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )


LAYERED = {"sharding": "parameters", "num_microbatches": 2}
REPLICATED = {"pipeline_parallel_size": 1, "num_microbatches": 2}


def run_all(payload: dict[str, Any]) -> dict[str, Any]:
    """Run every case of one launch; return by name what it gave on this rank."""
    folder = payload["folder"]
    found: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        module, trainer = build(optimizer), make_trainer(folder, **LAYERED)
        trainer.fit(module, datamodule=Data())
        found[f"fit {optimizer}"] = state_of(module), dict(trainer.callback_metrics)
        if optimizer == "adamw":
            found["plan"] = trainer.strategy.plan.schedule, trainer.strategy.plan.partition.layer_counts
            found["test"] = trainer.validate(module, datamodule=Data(), verbose=False)
            found["predict"] = torch.cat(trainer.predict(module, datamodule=Data()))  # type: ignore[arg-type]
    for taken in (False, True):
        with where_nothing_else_fits() if taken else contextlib.nullcontext():
            module, trainer = build(), make_trainer(folder, pipeline_parallel_size=1, sharding="auto")
            trainer.fit(module, datamodule=Data())
        found[f"auto {taken}"] = state_of(module), trainer.strategy.plan
    with where_nothing_else_fits():
        for kind in (Outside, Counting, Thawing):
            module, trainer = (build(kind=kind), make_trainer(folder, pipeline_parallel_size=1, sharding="auto"))
            trainer.fit(module, datamodule=Data())
            found[f"auto {kind.__name__}"] = state_of(module), trainer.strategy.plan
    for kind, folders in (("folder", True), ("file", False)):
        module, trainer = build(), make_trainer(folder, save_distributed_checkpoint=folders, **LAYERED)
        trainer.callbacks.append(saves(folder / f"{kind}.ckpt"))  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=Data())
        module.on_save_checkpoint = look_at_states  # type: ignore[method-assign]
        trainer.save_checkpoint(folder / f"{kind}-after.ckpt")
    for resume in payload["resume"]:
        source, layout = resume.split(" to ")
        module, trainer = build(), make_trainer(folder, 2, **(LAYERED if layout == "layered" else REPLICATED))
        trainer.fit(module, datamodule=Data(), ckpt_path=folder / f"{source}.ckpt")
        found[resume] = state_of(module)
    for optimizer in payload["late"]:
        (folder / optimizer).mkdir(exist_ok=True)
        found[f"late {optimizer}"] = run_late(folder / optimizer, optimizer, **LAYERED)
    found["watched"] = run_watched(folder, **LAYERED)
    for why in payload["why"]:
        module, trainer = build(), make_trainer(folder, **LAYERED)
        try:
            REFUSED[why](module, trainer)
            trainer.fit(module, datamodule=Data())
        except Exception as error:
            found[why] = f"{type(error).__name__}: {error}"
    return found


@contextlib.contextmanager
def where_nothing_else_fits() -> Iterator[None]:
    """Act as if whole parameters never fitted the memory."""

    def search(cost_model: CostModel, space: SearchSpace) -> SearchResult:
        if cost_model.training.sharded_parameters:
            return comparison.search(cost_model, space)
        raise NothingFitsError("whole parameters do not fit", excess_bytes=1.0, rank=0)

    with (
        unittest.mock.patch.object(shard_search, "search", search),
        unittest.mock.patch.object(sharding, "_PLANNED_SHARE", 0.0),
    ):
        yield


def run_watched(folder: Path, **strategy: Any) -> dict[str, Any]:
    """Train two epochs with a callback that reads and writes weights and samples between steps."""
    module, trainer, watching = build(), make_trainer(folder, 2, **strategy), Watching()
    trainer.callbacks.append(watching)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=Data())
    seen = {"norms": watching.norms, "sampled": watching.sampled, "whole": watching.most_whole}
    return seen | {"state": state_of(module)}


def run_late(folder: Path, optimizer: str, **strategy: Any) -> dict[str, Any]:
    """Train a module that is built without memory, evaluate it, save it in both formats, then resume and test from each checkpoint."""
    pl.seed_everything(3, verbose=False)
    found: dict[str, Any] = {}
    for kind in ("folder", "file"):
        module = Late(optimizer)
        trainer = make_trainer(folder, save_distributed_checkpoint=kind == "folder", **strategy)
        trainer.fit(module, datamodule=Data())
        found[f"{kind} fit"] = float(trainer.callback_metrics["val_loss"])
        found["blank"] = sum(bool(p.isnan().all()) for p in module.parameters())
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
        found[f"{kind} after"] = trainer.validate(module, datamodule=Data(), verbose=False)[0]["val_loss"]
        found[f"{kind} predicted"] = torch.cat(trainer.predict(module, datamodule=Data()))  # type: ignore[arg-type]
        trainer.save_checkpoint(folder / f"{kind}-evaluated.ckpt")
    for kind in ("folder", "file-evaluated", "folder-evaluated"):
        trainer = make_trainer(folder, 2, **strategy)
        trainer.fit(Late(optimizer), datamodule=Data(), ckpt_path=folder / f"{kind}.ckpt")
        found[f"{kind} resumed"] = float(trainer.callback_metrics["val_loss"])
        trainer, path = make_trainer(folder, **strategy), folder / f"{kind}.ckpt"
        tested = trainer.validate(Late(optimizer), datamodule=Data(), ckpt_path=path, verbose=False)
        found[f"{kind} tested"] = tested[0]["val_loss"]
    return found


def look_at_states(checkpoint: dict[str, Any]) -> None:
    """Check, as a user's hook, that optimizer states hold tensors and no stand-ins."""
    for state in checkpoint["optimizer_states"]:
        assert all(isinstance(v, Tensor) for entries in state.get("state", {}).values() for v in entries.values())


def _average(module: pl.LightningModule, trainer: Trainer) -> None:
    trainer.callbacks.append(WeightAveraging())  # type: ignore[attr-defined]


def thaw_in_step(module: Any, trainer: Trainer) -> None:
    own = module.training_step

    def training_step(batch: Tensor, batch_idx: int) -> Any:
        module.scale.requires_grad_(batch_idx == 1)
        return own(batch, batch_idx)

    module.training_step = training_step


def _use_gradient(use: Callable[[Tensor], Any]) -> Any:
    def add(module: pl.LightningModule, trainer: Trainer) -> None:
        class Use(pl.Callback):
            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                use(pl_module.layers[0].up.weight)

        trainer.callbacks.append(Use())  # type: ignore[attr-defined]

    return add


class Watching(pl.Callback):
    """Reads weights on all ranks and on one, changes them, and samples from the module; counts how many parameters are whole at a time."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.sampled: list[Tensor] = []
        self.most_whole = 0

    def _look(self, module: nn.Module) -> None:
        def count() -> int:
            return sum(is_whole(p) for p in module.layers.parameters())

        def is_whole(parameter: nn.Parameter) -> bool:
            try:
                return parameter.untyped_storage().nbytes() >= 4 * parameter.numel()
            except AbsentValueError:
                return False

        with ThreadPoolExecutor(1) as unwatched:  # torch's function modes are per thread: counting gathers nothing
            self.most_whole = max(self.most_whole, unwatched.submit(count).result())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for layer in pl_module.layers:
            self.norms.append(float(layer.down.weight.detach().norm()))
            self._look(pl_module)
        with torch.no_grad():
            pl_module.layers[1].up.weight.clamp_(-0.2, 0.2)
            pl_module.embedding.weight.data.mul_(0.99)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:  # the other ranks take part without calling anything
            self.sampled.append(pl_module(torch.arange(5)[None]).detach().clone())
            self._look(pl_module)


REFUSED = {
    "an average of weights": _average,
    "thawed in a step": thaw_in_step,
    "a gradient is read": _use_gradient(lambda weight: weight.grad),
    "a gradient is written": _use_gradient(lambda weight: setattr(weight, "grad", None)),
}
