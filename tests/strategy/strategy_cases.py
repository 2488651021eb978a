"""Small trainings that use Lightning's features, each run in plain Lightning and with HolmesStrategy on every rank.

A case is a function of a :class:`Setting` that returns plain data (numbers, lists, tensors); every rank must return what
plain Lightning returns in one process.
"""

import copy
import importlib
import logging
import os
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from comparing import state_of
from launch import keep_what_is_left
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from quiet import Recorder, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_holmes import HolmesStrategy

warnings.filterwarnings("ignore")


@dataclass
class Setting:
    """Where a case runs: in plain Lightning (``holmes`` is None) or with HolmesStrategy, and with how many replicas."""

    folder: Path
    holmes: dict[str, Any] | None = None
    replicas: int = 1
    recorder: Recorder = field(default_factory=Recorder)
    current: pl.Trainer | None = None

    def trainer(self, **options: Any) -> pl.Trainer:
        self.recorder = Recorder()
        defaults: dict[str, Any] = {"devices": 1, "max_epochs": 2, "logger": self.recorder, "log_every_n_steps": 1}
        if self.holmes is not None:
            defaults |= {"strategy": HolmesStrategy(**self.holmes), "use_distributed_sampler": False}
            defaults["devices"] = int(os.environ["WORLD_SIZE"])
        self.current = quiet_trainer(**(defaults | {"default_root_dir": self.folder} | options))
        return self.current

    def loader(self, data: Any, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
        """Make a loader; ``batch_size`` counts the samples of all replicas, which divide each batch among them."""
        if self.replicas > 1:
            options["sampler"] = Share(self, len(data))
        return DataLoader(data, batch_size // self.replicas, **options)

    @property
    def rank(self) -> int:
        return 0 if self.holmes is None else int(os.environ["RANK"])


class Share(Sampler[int]):
    """Every n-th sample in order; Lightning's own sampler would shuffle."""

    def __init__(self, setting: Setting, length: int) -> None:
        assert length % setting.replicas == 0
        self.setting = setting
        self.length = length

    def __len__(self) -> int:
        return self.length // self.setting.replicas

    def __iter__(self) -> Any:
        assert self.setting.current is not None
        strategy = self.setting.current.strategy
        assert isinstance(strategy, HolmesStrategy)
        return iter(range(strategy.data_parallel_rank, self.length, self.setting.replicas))


def samples(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Classifier(pl.LightningModule):
    """Four layers between a stem and a head; three classes."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0], sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def build(cls: type[pl.LightningModule] = Classifier, *args: Any, **kwargs: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    return cls(*args, **kwargs)


def numbers(metrics: Any) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items()}


def outcome(setting: Setting, trainer: pl.Trainer, module: nn.Module) -> dict[str, Any]:
    return {
        "lines": list(setting.recorder.lines),
        "callback_metrics": numbers(trainer.callback_metrics),
        "logged_metrics": numbers(trainer.logged_metrics),
        "progress_bar_metrics": numbers(trainer.progress_bar_metrics),
        "weights": state_of(module),
        "step": trainer.global_step,
    }


# logs


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("mean_input", x.mean(), sync_dist=True)
        self.log("before_max", x.max(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)
        loss, logits = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.log("epoch_only", loss.detach() + 1, on_step=False, on_epoch=True, sync_dist=True)
        self.log("lowest", logits.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, sync_dist=True)
        self.log("total", (logits.argmax(1) == y).float().sum(), reduce_fx="sum", on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss.item() * 3, "b": logits.pow(2).mean()}, prog_bar=True, sync_dist=True)
        self.log("constant", 2.5)
        self.log("no_logger", loss, logger=False, sync_dist=True)
        return {"loss": loss, "other": logits.detach().mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self.loss(batch)
        self.log_dict({"val_loss": loss, "val_b": logits.pow(2).mean()}, sync_dist=True)
        self.log("val_sum", logits.sum(), reduce_fx="sum", sync_dist=True)
        self.log("val_step", loss, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))


def case_logs(setting: Setting) -> Any:
    module = build(Logs)
    trainer = setting.trainer()
    trainer.fit(module, setting.loader(samples()), setting.loader(samples(16, 1)))
    return outcome(setting, trainer, module)


class Unsynchronised(Logs):
    """The same logs without sync_dist, as users write them for one device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("sum", logits.sum(), reduce_fx="sum", on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0])


def case_logs_without_sync(setting: Setting) -> Any:
    module = build(Unsynchronised)
    trainer = setting.trainer()
    trainer.fit(module, setting.loader(samples(22)), setting.loader(samples(13, 1)))
    return outcome(setting, trainer, module)


class Metrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.by_hand = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.correlation = torchmetrics.PearsonCorrCoef()
        self.area = torchmetrics.AUROC(task="multiclass", num_classes=3)
        self.validated = torchmetrics.SumMetric()
        self.collection = torchmetrics.MetricCollection(
            [
                torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
                torchmetrics.Precision(task="multiclass", num_classes=3, average="macro"),
            ],
            prefix="val_",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean(loss.detach(), weight=len(batch[0]))
        self.log("mean_loss", self.mean, on_step=True, on_epoch=True, prog_bar=True)
        self.by_hand.update(logits, batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.area.update(logits.softmax(1), batch[1])
        self.log("area", self.area, on_epoch=True)
        self.correlation.update(logits[:, 0], batch[0][:, 0])
        self.log("correlation", self.correlation, on_step=False, on_epoch=True)
        self.collection.update(logits, batch[1])
        self.validated.update(len(logits))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.samples, self.found = torchmetrics.SumMetric(), list[float]()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.of_epoch = torchmetrics.SumMetric()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples.update(len(batch[0]))
        self.of_epoch.update(len(batch[0]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found += [float(copy.deepcopy(metric).compute()) for metric in (self.samples, self.of_epoch)]


def case_metrics(setting: Setting) -> Any:
    module, counts = build(Metrics), Counts()
    trainer = setting.trainer(callbacks=[counts])
    trainer.fit(module, setting.loader(samples()), setting.loader(samples(16, 1)))
    first = outcome(setting, trainer, module)
    first |= {"validate": trainer.validate(module, setting.loader(samples(16, 2)), verbose=False)}
    return first | {"counted": counts.found, "after": [float(m.compute()) for m in (module.validated, counts.samples)]}


# what steps leave on the module


class Collects(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.validation_outputs: list[torch.Tensor] = []
        self.train_losses: list[float] = []
        self.seen: list[float] = []
        self.norms: list[float] = []
        self.epochs: list[Any] = []
        self.table: dict[str, list[float]] = {"loss": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.last_loss = loss.detach()
        self.last_logits = logits.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))
        self.log("from_hook", self.last_logits.mean())
        self.train_losses.append(float(self.last_loss))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.last_logits.abs().max()))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(sum(self.train_losses[-3:]))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.validation_outputs.append(logits.argmax(1))
        self.table["loss"].append(loss.item())
        return logits

    def on_validation_epoch_end(self) -> None:
        predictions = torch.cat(self.validation_outputs)
        self.log("share_of_0", (predictions == 0).float().mean())
        self.log("val_loss", sum(self.table["loss"]) / len(self.table["loss"]))
        self.epochs.append(len(predictions))
        self.validation_outputs.clear()
        self.table["loss"].clear()


def case_collects(setting: Setting) -> Any:
    module = build(Collects)
    trainer = setting.trainer(limit_val_batches=1.0)
    # one microbatch: a value that is assigned, not appended, would be the last microbatch's
    trainer.fit(module, setting.loader(samples()), setting.loader(samples(16, 1)))
    return outcome(setting, trainer, module) | {
        "seen": module.seen,
        "epochs": module.epochs,
        "norms": module.norms,
        "losses": module.train_losses,
    }


class FrontState(Classifier):
    """Changes its state before the layers, in code that runs on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inputs = torchmetrics.MeanMetric()
        self.sums: list[float] = []
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.count += 1
        self.sums.append(float(x.sum()))
        self.inputs.update(x.mean())
        loss = F.cross_entropy(self(self.norm(x)), y)
        self.log("count", float(self.count))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("inputs", self.inputs.compute())
        self.log("updates", float(self.inputs.update_count))
        self.inputs.reset()


def case_front_state(setting: Setting) -> Any:
    module = build(FrontState)
    trainer = setting.trainer()
    trainer.fit(module, setting.loader(samples()))
    return outcome(setting, trainer, module) | {"count": module.count, "sums": module.sums}


class Paces(Classifier):
    """State that the step changes after its layers, on one stage only, sets the learning rate, and hooks read it."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = 0.0
        self.seen: list[tuple[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.pace += 1.0
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("before the update", self.pace))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("after the batch", self.pace))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0 / (1.0 + self.pace))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": slower, "interval": "step"}}


class PacesWithoutUpdateHook(Paces):
    """No hook reads the state between the step and the update, while the state is transferred."""

    on_before_optimizer_step = Classifier.on_before_optimizer_step


class PacesInUpdate(PacesWithoutUpdateHook):
    """Reads the state between the closure and the optimizer's step, which it calls without Lightning."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.seen.append(("in the update", self.pace))
        if self.pace != 2.0:  # ranks must agree on this
            optimizer.optimizer.step()


class PacesUnseen(PacesWithoutUpdateHook):
    """Only the scheduler reads the state."""

    on_train_batch_end = Classifier.on_train_batch_end


def case_paces(setting: Setting) -> Any:
    seen = {}
    kinds = {
        "both": Paces,
        "late": PacesWithoutUpdateHook,
        "window": Paces,
        "own": PacesInUpdate,
        "unseen": PacesUnseen,
    }
    for name, cls in kinds.items():
        module = build(cls)
        trainer = setting.trainer(accumulate_grad_batches=2 if name == "window" else 1)
        trainer.fit(module, setting.loader(samples()))
        seen[name] = (module.seen, trainer.optimizers[0].param_groups[0]["lr"], outcome(setting, trainer, module))
    return seen


# callbacks


class Drops(Classifier):
    """A validation loss that falls and then rises by itself, so that early stopping has something to react to."""

    curve = (3.0, 2.0, 1.0, 1.5, 1.6, 1.7, 0.1, 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.loss(batch)
        self.log("val_loss", loss * 0 + self.curve[self.current_epoch], sync_dist=True)
        self.log("true_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def case_callbacks(setting: Setting) -> Any:
    module = build(Drops)
    keep = ModelCheckpoint(
        setting.folder / "best", filename="{epoch}-{true_loss:.4f}", monitor="true_loss", save_top_k=2, save_last=True
    )
    stop = EarlyStopping("val_loss", patience=2)
    trainer = setting.trainer(
        max_epochs=8, callbacks=[keep, stop, LearningRateMonitor()], enable_checkpointing=True, logger=True
    )
    recorder = Recorder()
    trainer.loggers = [recorder]
    trainer.fit(module, setting.loader(samples()), setting.loader(samples(16, 1)))
    setting.recorder = recorder
    return outcome(setting, trainer, module) | {
        "best": Path(keep.best_model_path).name,
        "score": float(keep.best_model_score),
        "kth": sorted(Path(p).name for p in keep.best_k_models),
        "last": Path(keep.last_model_path).name,
        "stopped": stop.stopped_epoch,
        "epoch": trainer.current_epoch,
        "files": sorted(p.name for p in (setting.folder / "best").glob("*.ckpt")),
    }


# gradients


class SGDClassifier(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def case_accumulate(setting: Setting) -> Any:
    module = build(SGDClassifier)
    trainer = setting.trainer(accumulate_grad_batches=2)
    trainer.fit(module, setting.loader(samples(40)))
    return outcome(setting, trainer, module)


class Groups(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.blocks[1].norm.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        decay = [p for n, p in self.named_parameters() if p.ndim >= 2 and not n.startswith("head")]
        rest = [p for n, p in self.named_parameters() if p.ndim < 2 and not n.startswith("head")]
        head = [p for n, p in self.named_parameters() if n.startswith("head")]
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.5},
                {"params": rest, "weight_decay": 0.0},
                {"params": head, "lr": 0.2},
            ],
            lr=0.05,
        )
        self.group_sizes = [len(g["params"]) for g in optimizer.param_groups]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.1, 0.2], total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def case_groups(setting: Setting) -> Any:
    module = build(Groups)
    trainer = setting.trainer(callbacks=[LearningRateMonitor()])
    trainer.fit(module, setting.loader(samples()))
    groups = trainer.optimizers[0].param_groups
    names = {id(p): n for n, p in module.named_parameters()}
    after = [[names[id(p)] for p in group["params"]] for group in groups]
    rates = [group["lr"] for group in groups]
    return outcome(setting, trainer, module) | {"sizes": module.group_sizes, "rates": rates, "after": after}


# the order of things


class AllSteps(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self.loss(batch)
        self.log("test_loss", loss, sync_dist=True)
        self.log("test_hits", (logits.argmax(1) == batch[1]).float().sum(), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        return {"class": logits.argmax(1), "logits": logits, "index": batch_idx}


def case_all_steps(setting: Setting) -> Any:
    module = build(AllSteps)
    trainer = setting.trainer()
    train, val = setting.loader(samples()), setting.loader(samples(16, 1))
    before = trainer.validate(module, val, verbose=False)
    trainer.fit(module, train, val)
    results = {
        "fit": outcome(setting, trainer, module),
        "before": before,
        "validate": trainer.validate(module, val, verbose=False),
        "test": trainer.test(module, setting.loader(samples(16, 2)), verbose=False),
    }
    if setting.replicas == 1:
        results["predict"] = trainer.predict(module, setting.loader(samples(14, 3)))
        two = [setting.loader(samples(6, 3)), setting.loader(samples(5, 4))]
        results["predict two"] = trainer.predict(module, two)
    results["outside"] = module(torch.ones(2, 8)).detach()
    again = setting.trainer(max_epochs=1)
    again.fit(module, train, val)
    results["second"] = outcome(setting, again, module)
    # the same trainer once more, for longer
    again.fit_loop.max_epochs = 2
    again.fit(module, train, val)
    results["third"] = outcome(setting, again, module)
    return results


class DiffersByRank(Dataset[Any]):
    """Data that are right on rank 0 only."""

    def __init__(self, rank: int) -> None:
        self.data = samples(24, seed=0 if rank == 0 else 100 + rank)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def case_broadcast_batch(setting: Setting) -> Any:
    if setting.holmes is not None:
        setting = Setting(setting.folder, setting.holmes | {"broadcast_batch": True}, setting.replicas)
    module = build()
    trainer = setting.trainer()
    loader = setting.loader(DiffersByRank(setting.rank))
    trainer.fit(module, loader, loader)
    return outcome(setting, trainer, module)


# optimizer hooks


# checkpoints


class Resumable(Classifier):
    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def case_resume(setting: Setting) -> Any:
    """Run four epochs; only the first two; and the last two from the checkpoint of those."""
    train = setting.loader(samples())
    whole = build(Resumable)
    trainer = setting.trainer(max_epochs=4)
    trainer.fit(whole, train, setting.loader(samples(16, 1)))
    never_stopped = outcome(setting, trainer, whole)
    keep = ModelCheckpoint(setting.folder / "resume", save_last=True)
    trainer = setting.trainer(max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(build(Resumable), train, setting.loader(samples(16, 1)))
    half = outcome(setting, trainer, whole)["lines"]
    path = setting.folder / "resume" / "last.ckpt"
    trainer = setting.trainer(max_epochs=4)
    continued = build(Resumable)
    trainer.fit(continued, train, setting.loader(samples(16, 1)), ckpt_path=path)
    ended = outcome(setting, trainer, continued)
    return {
        "never_stopped": never_stopped,
        "half": half,
        "ended": ended,
        "states": torch.load(path, weights_only=True)["optimizer_states"],
        "keys": sorted(set(torch.load(path, weights_only=True)) - {"lightning_holmes"}),  # the run's seed
        "manual": _save_by_hand(setting, trainer),
        "validated": trainer.validate(build(Resumable), setting.loader(samples(16, 1)), ckpt_path=path, verbose=False),
    }


def _save_by_hand(setting: Setting, trainer: pl.Trainer) -> Any:
    path = setting.folder / "by_hand.ckpt"
    trainer.strategy.barrier()
    trainer.save_checkpoint(path, weights_only=True)
    trainer.strategy.barrier()
    small = torch.load(path, weights_only=True)["state_dict"]
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return small, torch.load(path, weights_only=True)["optimizer_states"]


# running cases


# modules without memory


class BuiltLate(Classifier):
    """Built by configure_model. Its step needs what hooks make and the optimizer's learning rate; only training reads one of
    its parameters; a hook changes a weight before training. A residual that only training has forbids a split in the
    middle, which the sanity check alone would allow."""

    def __init__(self, changes: bool) -> None:
        pl.LightningModule.__init__(self)
        self.lr, self.changes = 0.05, changes

    def configure_model(self) -> None:
        if "stem" in self._modules:
            return
        with torch.random.fork_rng():  # plain Lightning draws in nn.Linear; building without memory does not
            self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.scale = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for parameter in self.parameters():
                count = parameter.numel()
                parameter.copy_((torch.arange(float(count)) * 7).sin().view(parameter.shape) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            first = x if index == 0 else first
            x = x + first if index == 2 and self.training else x
        return self.head(x)

    def on_fit_start(self) -> None:
        self.shapes = [tuple(p.shape) for p in self.parameters()]

    def on_train_start(self) -> None:
        self.losses: list[float] = []
        if self.changes:
            with torch.no_grad():
                self.blocks[1].linear.bias.add_(0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 1.0 + batch_idx / 8

    def on_validation_epoch_start(self) -> None:
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        loss = F.cross_entropy(self(batch[0]) * self.scale, batch[1]) * self.factor * (1 + rate)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])
        super().validation_step(batch, batch_idx)


def case_built_late(setting: Setting) -> Any:
    found = {}
    for name, sanity_steps, epochs in (("first", 2, 1), ("resumed", 2, 2), ("unchecked", 0, 1)):
        module, keep = build(BuiltLate, name == "first"), ModelCheckpoint(setting.folder / name, save_last=True)
        trainer = setting.trainer(
            max_epochs=epochs, num_sanity_val_steps=sanity_steps, callbacks=[keep], enable_checkpointing=True
        )
        saved = setting.folder / "first" / "last.ckpt" if name == "resumed" else None
        loaders = setting.loader(samples()), setting.loader(samples(16, 1))
        trainer.fit(module, *loaders, ckpt_path=saved)
        if setting.holmes is not None:
            plan: Any = trainer.strategy.plan  # type: ignore[attr-defined]
            assert plan.partition.layer_counts != (2, 2), "training decides"
        found[name] = {"losses": module.losses, "shapes": module.shapes, "lines": list(setting.recorder.lines)}
        found[name]["validate"] = trainer.validate(module, loaders[1], verbose=False)
    return found


CASES = {name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")}


def run_cases(payload: dict[str, Any]) -> dict[str, Any]:
    """Run cases of the module ``payload["of"]`` in turn, in every worker or in plain Lightning; return their results by name. Ends
    at the first error, since ranks may be out of step after it."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    cases = importlib.import_module(payload.get("of", __name__)).CASES
    results: dict[str, Any] = {}
    for name in payload["cases"]:
        folder = Path(payload["folder"]) / name
        folder.mkdir(parents=True, exist_ok=True)
        try:  # the setting refers to its trainer, and must be gone before what is left is kept
            results[name] = cases[name](Setting(folder, payload["holmes"], payload.get("replicas", 1)))
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(f"CASE {name}\n{results[name]['error']}", flush=True)
            break
        keep_what_is_left()
    return results
