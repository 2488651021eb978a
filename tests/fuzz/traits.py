"""What a case of the fuzzer is made of: a value for each axis, and the module, data and habits that these values mean.

    case = draw(17)                       # {"loss": "tokens", "stages": "2", ...}: what is not named has the axis's default
    module, loader = Fuzzed(case), make_loader(case, trainer)

An axis's first value is its default. A trait that steps, hooks or callbacks carry out is one entry of one table.
"""

import collections
import copy
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

Case = dict[str, str]
WIDTH, CLASSES, VOCABULARY, LENGTH, NUM_LAYERS, BATCH = 6, 3, 10, 5, 4, 8


# ---------------------------------------------------------------- layers, heads and losses


class Residual(nn.Module):
    """Hidden + tanh(linear(hidden)); ``down`` makes it a block that a tensor group can share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class FlatNorm(nn.BatchNorm1d):
    """BatchNorm over all positions."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.flatten(0, -2)).view_as(hidden)


class Counting(nn.Linear):
    """Counts its calls and keeps a running mean in buffers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(hidden.detach().to(self.mean.dtype).flatten(0, -2).mean(0), 0.1)
        return super().forward(hidden - 0.1 * self.mean).tanh()


def _linear(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Tanh())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": _linear,
    "residual": Residual,
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "batchnorm": lambda: _linear(FlatNorm(WIDTH)),
    "spectral": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "counting": Counting,
}
HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, CLASSES),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "norm": lambda: nn.Sequential(FlatNorm(WIDTH), nn.Linear(WIDTH, CLASSES)),
    "tied": lambda: nn.Identity(),
    "none": lambda: nn.Identity(),
}


def _per_sample(out: Tensor, y: Tensor) -> Tensor:
    """Mean over samples of the mean over each one's positions that are not padding."""
    losses = F.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=-100, reduction="none").view(len(y), -1)
    counts = (y.view(len(y), -1) != -100).sum(1).clamp(min=1)
    return (losses.sum(1) / counts).mean()


def _tokens(module: "Fuzzed", out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=-100)


def _pairs(module: "Fuzzed", out: Tensor, y: Tensor) -> Tensor:
    rows = F.normalize(out.view(len(y), -1), dim=1)
    return _per_sample(out, y) + 0.2 * torch.logsumexp(rows @ rows.T, 1).mean()


def _weighted(module: "Fuzzed", out: Tensor, y: Tensor) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1, dtype=out.dtype)
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), weight=weight, ignore_index=-100)


LOSSES: dict[str, Callable[["Fuzzed", Tensor, Tensor], Tensor]] = {
    "mean": lambda module, out, y: _per_sample(out, y),
    "square": lambda module, out, y: _per_sample(out, y) + out.square().mean(-1).view(len(y), -1).mean(1).mean(),
    "penalty": lambda module, out, y: (
        _per_sample(out, y) + 0.01 * torch.stack([p.square().sum() for p in module.parameters()]).sum()
    ),
    "scaled": lambda module, out, y: _per_sample(out, y) * (1 + module.current_epoch),
    "tokens": _tokens,
    "pairs": _pairs,
    "weighted": _weighted,
    "sum": lambda module, out, y: 0.1 * F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum"),
}


# ---------------------------------------------------------------- what a step keeps, logs, and does in later batches only


class Meter:
    """An ordinary object."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> float:
        self.total, self.count = self.total + value, self.count + 1
        return 1 + 0.1 * self.count

    def __float__(self) -> float:
        return self.total + self.count


class Kept(nn.Module):
    """A buffer; ``data``: written through ``.data``."""

    def __init__(self, *, data: bool = False) -> None:
        super().__init__()
        self.data = data
        self.register_buffer("value", torch.zeros(()))

    def add(self, value: Tensor) -> None:
        (self.value.data if self.data else self.value).add_(value.to(self.value.dtype))

    def __float__(self) -> float:
        return float(self.value)


def _set(name: str, value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda module, loss: setattr(module, name, value(module, loss))


_LOSSES: list[float] = []
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any], Callable[[Any], float]]] = {
    "none": (float, lambda m, loss: None, float),
    "attribute": (float, _set("kept", lambda m, loss: m.kept + loss.item()), float),
    "last": (lambda: torch.zeros(()), _set("kept", lambda m, loss: loss), float),
    "object": (Meter, lambda m, loss: m.kept.add(loss.item()), float),
    "list": (list, lambda m, loss: m.kept.append(loss), lambda kept: float(sum(kept))),
    "counter": (collections.Counter, lambda m, loss: m.kept.update(steps=1), lambda kept: float(kept["steps"])),
    "set": (set, lambda m, loss: m.kept.add(loss.item()), lambda kept: float(sum(kept))),
    "nested": (lambda: {"a": [0.0]}, lambda m, loss: m.kept["a"].append(loss.item()), lambda kept: sum(kept["a"])),
    "large": (lambda: torch.zeros(20_000), lambda m, loss: m.kept.data.fill_(loss.item()), lambda kept: float(kept[0])),
    "buffer": (Kept, lambda m, loss: m.kept.add(loss), float),
    "data": (lambda: Kept(data=True), lambda m, loss: m.kept.add(loss), float),
    "metric": (MeanMetric, lambda m, loss: m.kept.update(loss.float()), lambda kept: float(kept.compute())),
    "global": (lambda: _LOSSES.clear(), lambda m, loss: _LOSSES.append(loss.item()), lambda kept: sum(_LOSSES)),
}
"""How ``module.kept`` begins, what a step does with it after the layers, and its value for those who read it."""

_GLOBAL = np.random.default_rng(0)


def _seed_global() -> None:
    _GLOBAL.bit_generator.state = np.random.default_rng(0).bit_generator.state


RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "none": (float, lambda generator, x: 1.0),
    "numpy": (lambda: np.random.default_rng(0), lambda generator, x: float(generator.beta(2.0, 2.0))),
    "python": (lambda: random.Random(0), lambda generator, x: 1 + generator.random()),
    "torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda generator, x: 1 + torch.rand((), generator=generator, dtype=x.dtype),
    ),
    "global": (_seed_global, lambda generator, x: 1 + _GLOBAL.random()),
    "counter": (Meter, lambda generator, x: generator.add(1.0)),
    "iterator": (lambda: (1 + count / 64 for count in itertools.count()), lambda generator, x: next(generator)),
}
"""What the module has of its own, and the factor of the hidden state that a step draws from it before the layers."""

_BOTH, _EPOCH = {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}
LOGS: dict[str, tuple[Callable[[Any, Tensor, Tensor, Tensor], Any], dict[str, Any]] | None] = {
    "none": None,
    "step": (lambda m, loss, out, y: loss, {}),
    "epoch": (lambda m, loss, out, y: loss, _EPOCH),
    "both": (lambda m, loss, out, y: loss, _BOTH | {"prog_bar": True}),
    "synced": (lambda m, loss, out, y: loss, _BOTH | {"sync_dist": True}),
    "sized": (lambda m, loss, out, y: loss, _BOTH | {"batch_size": 3}),
    "accuracy": (lambda m, loss, out, y: (m.accuracy.update(out.flatten(0, -2), y.flatten()), m.accuracy)[1], _EPOCH),
    "number": (lambda m, loss, out, y: float(m.global_step), {}),
    "world": (lambda m, loss, out, y: 10.0 * m.trainer.world_size + m.trainer.is_global_zero, {}),
    "largest": (lambda m, loss, out, y: loss, _EPOCH | {"reduce_fx": "max"}),
    "summed": (lambda m, loss, out, y: loss, _EPOCH | {"reduce_fx": "sum"}),
    "perplexity": (lambda m, loss, out, y: loss.exp(), _BOTH),
    "root": (lambda m, loss, out, y: loss.abs().sqrt(), {}),
    "samples": (lambda m, loss, out, y: float(len(y)), _EPOCH | {"reduce_fx": "sum"}),
    "extreme": (lambda m, loss, out, y: out.max(), {}),
}
"""What a step logs, and how."""

FROM_STEP = 2


def _penalty(module: Any, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, next(module.layers[-1].parameters()), create_graph=True)
    return 0.1 * gradient.square().sum()


def _decay(trainer: Any, module: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.9


LATER: dict[str, Callable[[Any, Tensor], Any]] = {
    "never": lambda m, loss: None,
    "parameter": lambda m, loss: m.extra.square().sum(),
    "first layer": lambda m, loss: 0.1 * next(m.layers[0].parameters()).square().sum(),
    "log": lambda m, loss: m.log("later", loss),
    "logger": lambda m, loss: m.logger.experiment.append(loss.item()),
    "attribute": lambda m, loss: setattr(m, "found_late", loss.item()),
    "counts": lambda m, loss: 0.1 * m.count() * loss,
    "reads state": lambda m, loss: None,  # see forward
    "gradient": lambda m, loss: 0.1 * loss * _norm([next(m.layers[1].parameters()).grad]),
    "penalty": lambda m, loss: _penalty(m, loss),
    "sums": lambda m, loss: dist.all_reduce(loss.detach().clone()) if dist.is_initialized() else None,
    "rate": lambda m, loss: _decay(m.trainer, m),
    "rate at start": lambda m, loss: None,  # see training_step
    "changes batch": lambda m, loss: None,  # see loss
    "scaled": lambda m, loss: loss,
    "stops": lambda m, loss: setattr(m.trainer, "should_stop", True),
    "switches": lambda m, loss: m.layers[0].train(m.global_step % 2 == 0) and None,
    "draws": lambda m, loss: 0.1 * m.late_generator.random() * loss,
    "gathers": lambda m, loss: 0 * m.all_gather(loss.detach()).sum(),
}
"""What a step does from step FROM_STEP on; what it returns is added to the loss."""


# ---------------------------------------------------------------- habits of callbacks, and overridden methods


def _norm(tensors: Any) -> float:
    return float(sum(float(t.detach().double().square().sum()) for t in tensors if t is not None)) ** 0.5


def _hook(name: str, does: Callable[[Any, Any], Any]) -> Callable[[], Callback]:
    """Return a maker of a callback with one hook; ``does(trainer, module)`` may return a value, which is noted."""

    def hook(self: Callback, trainer: Any, module: Any, *arguments: Any) -> None:
        value = does(trainer, module)
        if value is not None:
            module.seen.append((name, value))

    return type("Habit", (Callback,), {name: hook})


def _clamp(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.5, 0.5)


def _rescale(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _freeze(trainer: Any, module: Any) -> None:
    module.layers[2].requires_grad_(trainer.current_epoch != 1)  # DDP would not reduce what is thawed later


def _own_average(trainer: Any, module: Any) -> float:
    average = module.__dict__.setdefault("_own_average", {n: p.detach().clone() for n, p in module.named_parameters()})
    for name, parameter in module.named_parameters():
        average[name].lerp_(parameter.detach(), 0.1)
    return _norm(average.values())


def _gradients(trainer: Any, module: Any) -> float:
    return _norm(p.grad for p in module.parameters())


def _raw_sum(trainer: Any, module: Any) -> float:
    value = torch.ones(3)
    if dist.is_initialized():
        dist.all_reduce(value)
    return float(value.sum())


def _own_metric(trainer: Any, module: Any) -> float:
    metric = SumMetric()
    metric.update(1.0 + trainer.global_step)
    return float(metric.compute())


class Writer(BasePredictionWriter):
    """Appends a line for each row that it is given to the file ``rows``."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        self._write(trainer, prediction)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self._write(trainer, torch.cat([each.flatten(0, -2) for each in predictions]))

    def _write(self, trainer: Any, rows: Tensor) -> None:
        lines = "".join(f"{row.double().sum().item()!r}\n" for row in rows.flatten(0, -2))
        os.makedirs(trainer.default_root_dir, exist_ok=True)
        with open(f"{trainer.default_root_dir}/rows", "a") as file:
            file.write(lines)


HABITS: dict[str, Callable[[], Callback] | None] = {
    "none": None,
    "norm": _hook("on_train_batch_end", lambda t, m: _norm(m.parameters())),
    "norm at start": _hook("on_train_batch_start", lambda t, m: _norm(m.parameters())),
    "norm of epoch": _hook("on_train_epoch_end", lambda t, m: _norm(m.state_dict().values())),
    "norm before zero_grad": _hook("on_before_zero_grad", lambda t, m: _norm(m.parameters())),
    "one parameter": _hook(
        "on_train_batch_end",
        lambda t, m: float(next(iter(m.head.parameters()), m.extra).sum()) if t.is_global_zero else None,
    ),
    "equal": _hook("on_train_batch_end", lambda t, m: float((next(m.layers.parameters()) == 0).sum())),
    "minus": _hook("on_train_batch_end", lambda t, m: float((torch.ones(()) - next(m.layers.parameters())).sum())),
    "gradient norm": _hook("on_before_optimizer_step", _gradients),
    "gradient after backward": _hook("on_after_backward", _gradients),
    "gradient after step": _hook("on_train_batch_end", _gradients),
    "clamp": _hook("on_train_batch_end", _clamp),
    "rescale": _hook("on_before_optimizer_step", _rescale),
    "freeze": _hook("on_train_epoch_start", _freeze),
    "decay": _hook("on_train_batch_start", _decay),
    "own average": _hook("on_train_batch_end", _own_average),
    "sets": _hook("on_train_batch_start", lambda t, m: setattr(m, "factor", 1 + 0.1 * t.global_step)),
    "appends": _hook(
        "on_train_batch_end", lambda t, m: m.kept.append(torch.ones(())) if type(m.kept) is list else None
    ),
    "accumulates": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "copy": _hook("on_train_epoch_end", lambda t, m: _norm(copy.deepcopy(m.layers).parameters())),
    "logs": _hook("on_train_batch_end", lambda t, m: m.log("hook", float(t.global_step) ** 2)),
    "logs epoch": _hook("on_train_epoch_end", lambda t, m: m.log("epoch_hook", 1.0 + t.current_epoch)),
    "metrics": _hook("on_train_batch_end", lambda t, m: sum(float(v) for v in t.callback_metrics.values())),
    "states": _hook(
        "on_train_batch_end", lambda t, m: float(sum(len(state) for state in t.optimizers[0].state.values()))
    ),
    "gather": _hook("on_train_batch_end", lambda t, m: float(m.all_gather(torch.ones(3)).sum())),
    "own metric": _hook("on_train_batch_end", _own_metric),
    "raw sum": _hook("on_train_batch_end", _raw_sum),
    "writer": Writer,
    "stop": _hook("on_train_batch_end", lambda t, m: setattr(t, "should_stop", t.global_step >= 5)),
    "averaging": lambda: EMAWeightAveraging(decay=0.8),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
    "early stopping": lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0),
}


def _warm_up(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (1 + self.trainer.global_step)


def _own_clipping(
    self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def _torch_clipping(
    self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
) -> None:
    self.seen.append(("clipped", float(nn.utils.clip_grad_norm_(self.parameters(), 0.2))))


def _scaled_batch(self: Any, batch: Any, dataloader_idx: int) -> Any:
    x, y, rest = unpack(self.traits, batch)
    return batch if x.dtype == torch.long else pack(self.traits, x * 0.5, y, rest)


def _skip_from(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if batch_idx == 3 else None


def _noting_outputs(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    self.seen.append(("outputs", float(sum(float(v.sum()) for v in outputs.values()))))


OVERRIDES: dict[str, tuple[str, Any] | None] = {
    "none": None,
    "optimizer_step": ("optimizer_step", _warm_up),
    "clip_gradients": ("configure_gradient_clipping", _own_clipping),
    "clip_grad_norm_": ("configure_gradient_clipping", _torch_clipping),
    "zero_grad": (
        "optimizer_zero_grad",
        lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False),
    ),
    "scheduler_step": ("lr_scheduler_step", lambda self, scheduler, metric: scheduler.step()),
    "scaled batch": ("on_after_batch_transfer", _scaled_batch),
    "skips": ("on_train_batch_start", _skip_from),
    "outputs": ("on_train_batch_end", _noting_outputs),
}


# ---------------------------------------------------------------- optimizers and schedules


class ScheduleFree(torch.optim.Optimizer):
    """The gradient is taken at ``y``, between the average ``x``, which ``eval`` puts in its place, and ``z``, which is stepped."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for y in group["params"]:
                if y.grad is not None:
                    z = self.state[y].setdefault("z", y.clone())
                    z.sub_(y.grad, alpha=group["lr"])
                    y.lerp_(z, 0.3)
        return loss

    @torch.no_grad()
    def _swap(self, *, is_training: bool) -> None:
        if is_training != self.is_training:
            self.is_training = is_training
            for group in self.param_groups:
                for y in group["params"]:
                    if "z" in self.state[y]:
                        y.lerp_(self.state[y]["z"], 0.5 if is_training else -1.0)

    def eval(self) -> None:
        self._swap(is_training=False)

    def train(self) -> None:
        self._swap(is_training=True)


optim, rates = torch.optim, torch.optim.lr_scheduler
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05}),
    "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "groups": (optim.AdamW, {"lr": 0.02}),
    "schedule-free": (ScheduleFree, {"lr": 0.05}),
    "scaled by world": (optim.SGD, {"lr": 0.05}),
    "rmsprop": (optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.05}),
    "adafactor": (optim.Adafactor, {"lr": 0.02}),
    "trained only": (optim.SGD, {"lr": 0.05, "momentum": 0.5}),
}
NORMALIZING = ("adamw", "amsgrad", "groups", "rmsprop", "adagrad", "adafactor")
SCHEDULERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]] | None] = {
    "none": None,
    "epoch": (rates.StepLR, {"step_size": 1, "gamma": 0.5}, {}),
    "step": (rates.ExponentialLR, {"gamma": 0.9}, {"interval": "step"}),
    "cycle": (rates.OneCycleLR, {"max_lr": 0.05, "total_steps": 40, "cycle_momentum": False}, {"interval": "step"}),
    "plateau": (rates.ReduceLROnPlateau, {"patience": 0, "threshold": 0.5}, {"monitor": "val_loss"}),
}

TRAINER: dict[str, dict[str, Any]] = {
    "default": {},
    "max_steps": {"max_steps": 6},
    "limited": {"limit_train_batches": 3},
    "reloads": {"reload_dataloaders_every_n_epochs": 1},
    "no inference mode": {"inference_mode": False},
    "logs rarely": {"log_every_n_steps": 3},
    "detects anomalies": {"detect_anomaly": True},
    "validates rarely": {"check_val_every_n_epoch": 2},
    "sanity": {"num_sanity_val_steps": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {  # further arguments of the strategy, which change no number
    "none": {},
    "broadcast": {"broadcast_batch": True},
    "monitor": {"monitor": 2},
    "async": {"async_checkpoint": True},
    "uniform": {"partition": "uniform"},
    **{name: {"gradient_sync": name} for name in ("all_reduce", "reduce_scatter", "p2p")},
}


# ---------------------------------------------------------------- the axes

AXES: dict[str, tuple[str, ...]] = {
    "input": ("vectors", "tokens"),
    "batch": ("tuple", "dict", "nested", "unlike", "extras"),
    "last": ("even", "smaller"),
    "shuffle": ("no", "yes"),
    "layers": tuple(LAYERS),
    "container": ("sequential", "list", "checkpointed", "slices"),
    "frozen": ("none", "first", "stem"),
    "shared": ("none", "layers"),
    "head": tuple(HEADS),
    "loss": tuple(LOSSES),
    "output": ("loss", "dict"),
    "state": tuple(STATES),
    "read": ("epoch end", "batch end", "save", "validation", "step"),
    "random": tuple(RANDOM),
    "log": tuple(LOGS),
    "second log": tuple(LOGS),
    "later": tuple(LATER),
    "hooks": ("each batch", "each epoch"),
    "habit": tuple(HABITS),
    "second habit": tuple(HABITS),
    "override": tuple(OVERRIDES),
    "optimizer": tuple(OPTIMIZERS),
    "clip": ("none", "norm", "value"),
    "accumulate": ("1", "2", "3"),
    "scheduler": tuple(SCHEDULERS),
    "evaluation": ("none", "validation", "mid-epoch", "list", "metric", "functions", "predict", "test"),
    "checkpoint": ("none", "end", "middle", "epoch"),
    "trainer": tuple(TRAINER),
    # the layout
    "stages": ("1", "2", "3"),
    "replicas": ("1", "2"),
    "chunks": ("auto", "1", "2"),
    "schedule": (
        *("auto", "1f1b", "gpipe", "eager_1f1b", "zero_bubble", "zero_bubble_v", "interleaved_1f1b", "breadth_first"),
    ),
    "microbatches": ("auto", "1", "2"),
    "evaluation microbatches": ("auto", "1", "2"),
    "sharding": ("none", "optimizer", "parameters", "auto"),
    "nodes": ("0", "1"),
    "tensor": ("1", "2"),
    "precision": ("double", "32-true", "bf16-mixed"),
    "format": ("file", "folder"),
    "option": tuple(OPTIONS),
    "resume": ("same", "one", "stages", "shards", "nodes"),
}
LAYOUT = tuple(AXES)[tuple(AXES).index("stages") :]


def draw(seed: int) -> Case:
    """Return the case of a seed: three to nine traits of the module and its run, and a layout."""
    choose = random.Random(seed)
    case: Case = {}
    for axis in choose.sample([axis for axis in AXES if axis not in LAYOUT], choose.randint(3, 9)):
        case[axis] = choose.choice(AXES[axis][1:])
    for axis in LAYOUT:
        case[axis] = choose.choice(AXES[axis]) if choose.random() < 0.5 else AXES[axis][0]
    if choose.random() < 0.6:
        case["stages"] = choose.choice(("2", "2", "3"))
    if "state" in case and "read" not in case:
        case["read"] = choose.choice(AXES["read"])
    return settle(case)


def settle(case: Case) -> Case:
    """Return a case of values that can go together, without the defaults; a layout that arguments alone refuse is not tried."""
    case = {axis: case.get(axis, values[0]) for axis, values in AXES.items()}
    if case["input"] == "vectors" and case["head"] == "tied":
        case["head"] = "none"
    if case["tensor"] == "2":  # one replica and one stage: four processes cost more than they find
        case |= {"layers": "residual", "container": "list", "shared": "none", "sharding": "none", "nodes": "0"}
        case |= {"stages": "1", "replicas": "1", "chunks": "auto", "schedule": "auto", "format": "folder"}
        case |= {a: "none" for a in ("habit", "second habit") if case[a] != "writer"}
        case |= {"resume": "same", "override": "none"}  # these, and a penalty, would read parts
        case |= {"loss": "mean"} if case["loss"] == "penalty" else {}
        case |= {"optimizer": "sgd"} if case["optimizer"] in ("adafactor", "schedule-free") else {}
        case |= {"trainer": "default"} if case["trainer"] == "detects anomalies" else {}  # torch has none for DTensors
        case |= {"later": "never"} if case["later"] in ("first layer", "gradient", "penalty") else {}
    if case["precision"] == "bf16-mixed":
        case |= {"optimizer": "sgd", "loss": "mean"}  # others make much of rounding
        case |= {axis: AXES[axis][0] for axis in ("log", "second log") if case[axis] == "accuracy"}
        case |= {"evaluation": "validation"} if case["evaluation"] == "metric" else {}
    if case["layers"] == "batchnorm" or case["head"] == "norm":
        # the gradient of a bias before BatchNorm is rounding, which these divide by its size; Adafactor adds next to nothing to it
        rounds = NORMALIZING if case["precision"] == "32-true" else ("adafactor",)
        case |= {"optimizer": "sgd"} if case["optimizer"] in rounds else {}
    if case["stages"] == "3":  # the rank in the middle has neither end of the module
        case |= {"replicas": "1", "chunks": "auto"}
        case |= {"schedule": "1f1b"} if case["schedule"] in ("interleaved_1f1b", "zero_bubble_v") else {}
    if case["nodes"] != "0" or case["sharding"] == "parameters":
        case["schedule"] = "auto"
    if case["nodes"] != "0":
        case["sharding"] = "none"
    if case["sharding"] in ("optimizer", "parameters") and case["replicas"] == "1":
        case["sharding"] = "none"
    if case["stages"] == "1":
        case |= {"chunks": "auto"} if case["schedule"] != "breadth_first" else {}
        case["schedule"] = "breadth_first" if case["schedule"] == "breadth_first" else "auto"
    elif case["schedule"] == "interleaved_1f1b":
        case["chunks"] = "2"
    elif case["schedule"] not in ("auto", "breadth_first"):
        case["chunks"] = "auto"
    if "accumulates" in (case["habit"], case["second habit"]):
        case["accumulate"] = "1"
    if case["override"] == "clip_gradients":
        case["clip"] = "none"
    if case["checkpoint"] not in ("middle", "epoch"):
        case["resume"] = "same"
    if case["shuffle"] == "yes":
        case["replicas"] = "1"
        case["sharding"] = "none"
    if not {"early stopping"}.isdisjoint({case["habit"], case["second habit"]}) or case["scheduler"] == "plateau":
        case["evaluation"] = "validation" if case["evaluation"] in ("none", "predict", "test") else case["evaluation"]
    if case["read"] == "validation" and case["evaluation"] in ("none", "predict", "test"):
        case["evaluation"] = "validation"
    if case["read"] == "batch end":
        case["hooks"] = "each batch"
    if case["read"] == "save" and case["checkpoint"] == "none":
        case["checkpoint"] = "end"
    if "writer" in (case["habit"], case["second habit"]):
        case["evaluation"] = "predict"
    return {axis: value for axis, value in case.items() if value != AXES[axis][0]}


# ---------------------------------------------------------------- data


def pack(case: Case, x: Tensor, y: Tensor, rest: Tensor) -> Any:
    """Return a batch in the case's form."""
    return {
        "tuple": (x, y),
        "dict": {"x": x, "y": y},
        "nested": {"inputs": {"x": x}, "targets": [y]},
        "unlike": {"labelled": [x, y], "unlabelled": [rest, rest.flip(0)]},
        "extras": {"x": x, "y": y, "names": [f"row {index}" for index in range(len(x))], "scale": torch.tensor(2.0)},
    }[case.get("batch", "tuple")]


def unpack(case: Case, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and further inputs, of which there may be more."""
    form = case.get("batch", "tuple")
    if form == "tuple":
        return batch[0], batch[1], batch[0]
    if form == "nested":
        return batch["inputs"]["x"], batch["targets"][0], batch["inputs"]["x"]
    if form == "unlike":
        return *batch["labelled"], batch["unlabelled"][0]
    return batch["x"], batch["y"], batch["x"]


def make_loader(case: Case, trainer: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return a loader of four batches, or a smaller fifth; a replica takes every n-th sample, and its part of each batch."""
    sharing = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    count = 4 * BATCH + (BATCH // 2 if case.get("last") == "smaller" else 0)
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if case.get("precision", "double") == "double" else torch.float32
    samples = []
    for index in range(count):
        length = 2 + (index * 7 + index // BATCH) % (LENGTH - 1)
        if case.get("input") == "tokens":
            x = torch.randint(1, VOCABULARY, (length,), generator=generator)
            y = torch.randint(CLASSES, (length,), generator=generator)
        else:
            x = torch.randn(WIDTH, generator=generator).to(dtype)
            y = torch.randint(CLASSES, (1,), generator=generator)
        samples.append((x, y))

    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        pad = nn.utils.rnn.pad_sequence
        x, y = (
            pad([r[0] for r in rows], batch_first=True),
            pad([r[1] for r in rows], batch_first=True, padding_value=-100),
        )
        return pack(case, x, y if case.get("input") == "tokens" else y[:, 0], torch.cat([x, x]))

    size = BATCH // sharing["num_replicas"]
    if shuffle:
        return DataLoader(samples, batch_size=size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    indices = range(sharing["rank"], count, sharing["num_replicas"])
    return DataLoader(samples, batch_size=size, sampler=indices, collate_fn=collate)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the module


class Fuzzed(pl.LightningModule):
    """The module of a case. ``seen``: what hooks have noted."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.traits = {axis: case.get(axis, values[0]) for axis, values in AXES.items()}
        is_tokens = self.traits["input"] == "tokens"
        self.stem = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0) if is_tokens else nn.Linear(WIDTH, WIDTH)
        made = [LAYERS[self.traits["layers"]]() for _ in range(NUM_LAYERS)]
        in_list = self.traits["container"] in ("list", "checkpointed")
        self.layers = nn.ModuleList(made) if in_list else nn.Sequential(*made)
        if self.traits["shared"] == "layers":
            name, shared = next((n, p) for n, p in made[0].named_parameters() if p.ndim == 2)
            owner, _, attribute = name.rpartition(".")
            if "parametrizations" not in name:
                setattr(made[3].get_submodule(owner), attribute, shared)
        self.head = HEADS[self.traits["head"]]()
        self.extra = nn.Parameter(torch.ones(3))
        if self.traits["frozen"] == "first":
            made[0].requires_grad_(False)
            made[1].requires_grad_(False)
        if self.traits["frozen"] == "stem":
            self.stem.requires_grad_(False)
        self.accuracy = MulticlassAccuracy(CLASSES, ignore_index=-100)
        self.val_accuracy = MulticlassAccuracy(CLASSES, ignore_index=-100)
        self.generator = RANDOM[self.traits["random"]][0]()
        self.late_generator = random.Random(1) if self.traits["later"] == "draws" else None
        self.kept = STATES[self.traits["state"]][0]()
        self.seen: list[tuple[str, float]] = []
        self.val_losses: list[Tensor] = []
        self.is_shared_out, self.factor, self.counted = False, 1.0, 0
        if self.traits["precision"] == "double":
            self.double()

    def configure_model(self) -> None:
        mesh = self.device_mesh if self.traits["tensor"] == "2" else None
        if mesh is not None and not self.is_shared_out:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            self.is_shared_out = True
            plan = {
                f"layers.{i}.{n}": made()
                for i in range(NUM_LAYERS)
                for n, made in (("up", ColwiseParallel), ("down", RowwiseParallel))
            }
            parallelize_module(self, mesh["tensor_parallel"], plan)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        hidden = hidden * RANDOM[self.traits["random"]][1](self.generator, hidden)
        if self.traits["later"] == "reads state" and self.training and self.global_step >= FROM_STEP:
            hidden = hidden * (1 + 0.1 * self.state)
        container = self.traits["container"]
        if container == "list":
            for layer in self.layers:
                hidden = layer(hidden)
        elif container == "checkpointed":
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        elif container == "slices":
            hidden = self.layers[2:](self.layers[:2](hidden))
        else:
            hidden = self.layers(hidden)
        if self.traits["head"] == "tied":
            return F.linear(hidden, self.stem.weight[:CLASSES])
        return self.head(hidden)[..., :CLASSES]

    def loss(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y, more = unpack(self.traits, batch)
        if self.traits["later"] == "changes batch" and x.is_floating_point():
            x.mul_(0.5)
        out = self(x)
        loss = LOSSES[self.traits["loss"]](self, out, y)
        if self.traits["batch"] == "unlike":
            loss = (
                loss + 0.1 * more.to(loss.dtype).square().mean() * out.square().mean(-1).view(len(y), -1).mean(1).mean()
            )
        if self.traits["batch"] == "extras":
            loss = loss * batch["scale"]
        return loss * self.factor, out, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.traits["later"] == "rate at start" and self.global_step >= FROM_STEP:
            _decay(self.trainer, self)
        loss, out, y = self.loss(batch)
        STATES[self.traits["state"]][1](self, loss.detach())
        for name in dict.fromkeys((self.traits["log"], self.traits["second log"])):
            logged = LOGS[name]
            if logged is not None:
                self.log(name, logged[0](self, loss, out.detach(), y), **logged[1])
        if self.global_step >= FROM_STEP:
            more = LATER[self.traits["later"]](self, loss)
            loss = loss if more is None else loss + more
        if self.traits["read"] == "step":
            self.log("state", self.state)
        return loss if self.traits["output"] == "loss" else {"loss": loss, "squares": out.detach().square().mean()}

    @property
    def state(self) -> float:
        return STATES[self.traits["state"]][2](self.kept)

    def note_state(self, where: str) -> None:
        if self.traits["read"] == where and self.traits["state"] != "none":
            self.seen.append((where, self.state))

    def count(self) -> int:
        self.counted += 1
        return self.counted

    def on_train_epoch_start(self) -> None:
        if self.traits["optimizer"] == "schedule-free":
            self.optimizers().optimizer.train()

    def on_train_epoch_end(self) -> None:
        self.note_state("epoch end")
        if self.traits["optimizer"] == "schedule-free":
            self.optimizers().optimizer.eval()
            self.seen.append(("averaged", _norm(self.parameters())))
        if self.traits["read"] == "epoch end":
            self.log("average", self.state)

    def on_save_checkpoint(self, saved: dict[str, Any]) -> None:
        if self.traits["read"] == "save":
            saved["state_of_case"] = self.state

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out, y = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        if self.traits["evaluation"] == "list":
            self.val_losses.append(loss)
        if self.traits["evaluation"] == "metric":
            self.val_accuracy(out.flatten(0, -2), y.flatten())
            self.log("val_accuracy", self.val_accuracy)
        if self.traits["evaluation"] == "functions":
            self.log_dict({"val_perplexity": loss.exp(), "val_most": out.max(), "val_samples": float(len(y))})

    def on_validation_epoch_end(self) -> None:
        self.note_state("validation")
        if self.traits["evaluation"] == "list":
            self.log("val_mean", torch.stack(self.val_losses).mean(), sync_dist=True)
            self.val_losses.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch)[0], sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)[1]

    def configure_optimizers(self) -> Any:
        parameters: Any = list(self.parameters())
        if self.traits["optimizer"] == "trained only":
            parameters = [p for p in parameters if p.requires_grad]
        if self.traits["optimizer"] == "groups":
            flat, weights = [p for p in parameters if p.ndim <= 1], [p for p in parameters if p.ndim > 1]
            parameters = [{"params": weights, "weight_decay": 0.1}, {"params": flat, "lr": 0.01}]
        kind, options = OPTIMIZERS[self.traits["optimizer"]]
        if self.traits["optimizer"] == "scaled by world":
            options = {"lr": 0.05 * self.trainer.world_size}
        optimizer, scheduler = kind(parameters, **options), SCHEDULERS[self.traits["scheduler"]]
        if scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler[0](optimizer, **scheduler[1]), **scheduler[2]},
        }


def make_module(case: Case) -> Fuzzed:
    """Return the case's module; an overridden method is its class's own."""
    override = OVERRIDES[case.get("override", "none")]
    methods: dict[str, Any] = {} if override is None else dict([override])
    if case.get("hooks") != "each epoch":
        methods["on_train_batch_end"] = lambda self, *_: self.note_state("batch end")
    return type("Fuzzed", (Fuzzed,), methods)(case)  # type: ignore[no-any-return]
