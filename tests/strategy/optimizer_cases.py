"""Small fits with many optimizers, precisions and callbacks; each runs in one plain process and on every rank of a pipeline."""

import math
import os
from typing import Any

import lightning.pytorch as pl
import torch
from comparing import state_of
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from quiet import quiet_trainer, saves
from strategy_cases import Classifier, Setting, build, outcome, samples
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_holmes import HolmesStrategy


class Chosen(Classifier):
    """The classifier with the optimizer that a given function makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def train(setting: Setting, make: Any, cls: type[Classifier] = Chosen, **options: Any) -> Any:
    module = build(cls) if make is None else build(cls, make)
    trainer = setting.trainer(**options)
    trainer.fit(module, setting.loader(samples()), setting.loader(samples(16, 1)))
    return outcome(setting, trainer, module)


def muon(module: nn.Module) -> Any:
    """Make Muon over all matrices, those of blocks.0 in a group of their own: stages differ in what they hold of each group."""
    matrices = [p for n, p in module.named_parameters() if p.ndim == 2 and n.startswith("blocks.0")]
    rest = [p for n, p in module.named_parameters() if p.ndim == 2 and not n.startswith("blocks.0")]
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return torch.optim.Muon([{"params": matrices, "lr": 0.05}, {"params": rest, "lr": 0.02}])


def one_stage_only(make: Any) -> Any:
    """Leave all parameters of the second stage out of the optimizer."""
    return lambda module: make([p for n, p in module.named_parameters() if n.startswith(("stem", "blocks.0"))])


def case_optimizers(setting: Setting) -> Any:
    """Train with many of torch's optimizers, with foreach and fused, and with groups of which a stage holds nothing."""
    choices: dict[str, Any] = {
        "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.05, foreach=True),
        "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), 0.05, fused=True),
        "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True),
        "muon": muon,
        "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
        "asgd": lambda m: torch.optim.ASGD(m.parameters(), 0.05),
        "rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
        "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.05),
        "empty_adamw_fused": one_stage_only(lambda p: torch.optim.AdamW(p, 0.05, fused=True)),
        "empty_sgd": one_stage_only(lambda p: torch.optim.SGD(p, 0.1, foreach=True)),
        "empty_muon": lambda m: torch.optim.Muon([m.stem.weight, m.blocks[0].linear.weight], 0.05),
    }
    found = {}
    for name, make in choices.items():
        try:
            found[name] = train(setting, make, max_epochs=1, limit_val_batches=0)["weights"]
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error
    return found


class Schedules(Classifier):
    def configure_optimizers(self) -> Any:
        decayed = [(n, p) for n, p in self.named_parameters() if p.ndim == 2]
        rest = [(n, p) for n, p in self.named_parameters() if p.ndim != 2]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], 0.05)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates = [g["lr"] for g in optimizer.param_groups]
        self.log("rate", self.rates[0])


def case_named_groups_and_schedules(setting: Setting) -> Any:
    return train(setting, None, Schedules)


class Norms(Chosen):
    """Logs the gradients' norms as Lightning's documentation shows."""

    norms: Any = ()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        blocks = grad_norm(self.blocks, "inf")
        self.norms = (*self.norms, {k: float(v) for k, v in {**norms, **blocks}.items()})


def case_grad_norm(setting: Setting) -> Any:
    module = build(Norms, lambda m: torch.optim.SGD(m.parameters(), 0.1))
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(module, setting.loader(samples()))
    return {"norms": list(module.norms), "lines": list(setting.recorder.lines)}


# averages


def adam(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), 0.05)


def case_averages(setting: Setting) -> Any:
    found: dict[str, Any] = {}
    made = {
        "ema": lambda: EMAWeightAveraging(decay=0.8),
        "mean": lambda: WeightAveraging(use_buffers=False),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2),
    }
    for name, callback in made.items():
        keep = ModelCheckpoint(setting.folder / name, save_last=True, every_n_epochs=2)
        found[name] = train(
            setting, None, Classifier, max_epochs=4, callbacks=[callback(), keep], enable_checkpointing=True
        )
        # stopped after two epochs and resumed
        first, second = setting.folder / f"{name}_first", build()
        keep = ModelCheckpoint(first, save_last=True)
        options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 4}
        loaders = setting.loader(samples()), setting.loader(samples(16, 1))
        setting.trainer(callbacks=[callback(), keep, Stop()], **options).fit(second, *loaders)
        third = build()
        trainer = setting.trainer(callbacks=[callback()], max_epochs=4)
        trainer.fit(third, *loaders, ckpt_path=keep.last_model_path)
        found[f"{name}_resumed"] = state_of(third)
    return found


class OwnAverage(pl.Callback):
    """An average of weights as users write it with torch alone: it reads all parameters."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = AveragedModel(pl_module, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module)


def case_torchs_average(setting: Setting) -> Any:
    """Average with torch's AveragedModel. "local" differs between ranks: other stages' parameters are placeholders, and so are
    their averages."""
    module, own = build(), OwnAverage()
    setting.trainer(max_epochs=2, callbacks=[own]).fit(module, setting.loader(samples()))
    averaged = {n: p.detach().clone() for n, p in own.average.module.named_parameters()}
    return {"weights": state_of(module), "local": {n: p for n, p in averaged.items() if not p.isnan().all()}}


class Stop(pl.Callback):
    """Stops a run after two epochs, before its max_epochs."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch >= 1


# fine-tuning


class TopFirst(BaseFinetuning):
    """Trains the head, then the upper blocks (of the second stage), then the rest (of both)."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.stem, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            # the norms' weights are equal to each other, as are their biases, and Lightning takes them for the same parameter; see below
            self.unfreeze_and_add_param_group(pl_module.blocks[2:], optimizer, lr=0.02)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.stem, pl_module.blocks], optimizer)
            optimizer.param_groups[1]["lr"] = 0.01

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the names of the parameters in each group, as user code may."""
        names = {p: n for n, p in pl_module.named_parameters()}
        pl_module.groups.append([[names[p] for p in g["params"]] for g in trainer.optimizers[0].param_groups])


class Tuned(Classifier):
    """Begins with its head in the optimizer, and with a frozen norm's weight, which is equal to the norms' weights that are added later."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Any] = []
        self.norm = nn.LayerNorm(8).requires_grad_(False)

    @property
    def backbone(self) -> Any:
        return self.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters()}, {"params": self.norm.weight, "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def case_finetuning(setting: Setting) -> Any:
    """Run four epochs with a checkpoint after epoch 1, and resume from it in another run; gradients are clipped by the norm of
    all that trains."""
    found: dict[str, Any] = {}
    loader = setting.loader(samples())
    for name, callback in (("own", TopFirst), ("backbone", lambda: BackboneFinetuning(2, lambda epoch: 1.5))):
        module, path = build(Tuned), setting.folder / f"{name}.ckpt"
        options: dict[str, Any] = {"max_epochs": 4, "gradient_clip_val": 0.3}
        behind = saves(path, at=lambda trainer: trainer.current_epoch == 1)
        setting.trainer(callbacks=[callback(), behind], **options).fit(module, loader)
        again = build(Tuned)
        trainer = setting.trainer(callbacks=[callback()], **options)
        trainer.fit(again, loader, ckpt_path=path)
        (optimizer,) = trainer.optimizers
        found[name] = {
            "groups": module.groups,
            "groups again": again.groups,
            "rates": [group["lr"] for group in optimizer.param_groups],
            "weights": state_of(module),
            "weights again": state_of(again),
        }
        # a checkpoint that is written after an unfreezing can be resumed, too
        late = setting.folder / f"{name}_late.ckpt"
        trainer.save_checkpoint(late)
        last = build(Tuned)
        setting.trainer(callbacks=[callback()], max_epochs=5, gradient_clip_val=0.3).fit(last, loader, ckpt_path=late)
        found[name]["weights at last"] = state_of(last)
    return found


def case_added_group(setting: Setting) -> Any:
    """Add a group in a callback that is no finetuning callback."""

    class Adds(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                for optimizer in trainer.optimizers:
                    optimizer.add_param_group({"params": list(pl_module.blocks.parameters()), "lr": 0.02})

    module = build(Chosen, lambda m: torch.optim.SGD(m.head.parameters(), 0.1, momentum=0.9))
    trainer = setting.trainer(max_epochs=3, gradient_clip_val=0.3, callbacks=[Adds()])
    trainer.fit(module, setting.loader(samples()))
    trainer.save_checkpoint(setting.folder / "added.ckpt", weights_only=False)
    return state_of(module)


# precision and accidents


def case_loss_scaling(setting: Setting) -> Any:
    """Train with a real GradScaler, whose first scale fits or overflows. 16-bit floats on the CPU, in torch's autocast."""
    found = {}
    for name, first in (("fits", 2.0**8), ("overflows", 2.0**40)):
        scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        module = build(Chosen, adam)
        trainer = setting.trainer(plugins=[plugin], gradient_clip_val=0.5, max_epochs=6)
        trainer.fit(module, setting.loader(samples()))
        found[name] = {"weights": state_of(module), "scale": scaler.get_scale()}
    return found


def case_nan_loss(setting: Setting) -> Any:
    """Check that hooks of every rank see the last stage's NaN, and that Lightning's EarlyStopping stops all ranks."""
    from lightning.pytorch.callbacks import EarlyStopping

    class Broken(Chosen):
        seen: Any = ()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 1 else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = (*self.seen, math.isnan(float(outputs["loss"])))

    module = build(Broken, adam)
    stop = EarlyStopping("loss", check_on_train_epoch_end=True)
    trainer = setting.trainer(callbacks=[stop], max_epochs=5)
    trainer.fit(module, setting.loader(samples()))
    return {"seen": list(module.seen), "epoch": trainer.current_epoch}


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


class RootOfZero(nn.Module):
    """A layer that returns its input and gives NaN in the backward of the last of several square roots."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = layer.norm, layer.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        return x + 0 * (y - y).sqrt() + 0 * (y * y + 1).sqrt()


class Overflow(nn.Module):
    """A layer with an extra parameter that is zero and whose gradient is infinite."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.nothing = layer, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (self.nothing * 1e25) * 1e25


def anomaly(payload: dict[str, Any]) -> str:
    """Return the error that ends this rank's fit when a gradient in ``payload["block"]`` becomes NaN, or infinite, under detect_anomaly."""
    module = build(Chosen, adam)
    block = payload["block"]
    module.blocks[block] = (Overflow if payload.get("infinite") else RootOfZero)(module.blocks[block])
    trainer = quiet_trainer(
        HolmesStrategy(pipeline_parallel_size=2, sharding="optimizer" if payload["sharded"] else "auto"),
        devices=int(os.environ["WORLD_SIZE"]),
        detect_anomaly=payload.get("detect", True),
        max_epochs=1,
    )
    try:
        trainer.fit(module, torch.utils.data.DataLoader(samples(), 8))
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "trained on"
