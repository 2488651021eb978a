"""Hooks that read or change parameters and gradients: every rank gives the numbers of plain Lightning in one process.

Baseline: ``Trainer(devices=1)`` in this process, same seed, whole batches. Tolerance: 1e-5 relative (fp32). All cases of a
layout run in one launch.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import assert_alike, state_of
from launch import chosen, launch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, ModelPruning
from strategy_cases import Classifier, Setting, build, run_cases, samples
from tripwire_helpers import TOOLS, clip, largest, norm_by_hand, prune

from lightning_holmes.checkpoint import read_state_dict


class Plain(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def fit(setting: Setting, cls: Any = Plain, *callbacks: Callback, **options: Any) -> tuple[pl.Trainer, Any]:
    module = build(cls)
    trainer = setting.trainer(**{"callbacks": list(callbacks), "max_epochs": 2} | options)
    trainer.fit(module, setting.loader(samples()))
    return trainer, module


class ClipsInHook(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [*getattr(self, "norms", ()), clip(self.parameters(), 0.1)]


class ClipsGroups(Plain):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            clip(group["params"], 0.1)


class ClipsTwice(Plain):
    """Clips with Lightning's method and by hand, and reads the norms between."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        self.norms = [*getattr(self, "norms", ()), norm_by_hand(self.parameters()), clip(self.parameters(), 0.15)]


class Steps(Plain):
    """Runs the closure itself, and skips steps depending on the gradient norm."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen = [*getattr(self, "seen", ()), largest(self)]
        if batch_idx == 1:
            optimizer_closure()
            if norm_by_hand(self.parameters()) > 0.01:
                return
        optimizer.step(closure=optimizer_closure)
        self.seen.append(norm_by_hand(self.parameters()))


class Forgets(Plain):
    """Clears the momentum after an epoch, in one of two ways, and calls the unwrapped optimizer's step."""

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        if self.current_epoch == 0:
            optimizer.state.clear()
        else:
            optimizer.optimizer.state = defaultdict(dict)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(closure=optimizer_closure)


class KeepsTrainer(Callback):
    """Uses none of its hooks' arguments: it keeps the trainer from ``setup``."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.norms: list[float] = []

    def on_after_backward(self, *_: Any) -> None:
        self.norms.append(clip(self.trainer.lightning_module.parameters(), 0.1))


class Norms(Callback):
    """Reads norms on one rank only, and then waits for the others."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.is_global_zero:
            self.found.append({n: float(v) for n, v in TOOLS["norms"](pl_module, 2).items()})
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self.found.append([float(p.norm()) for g in optimizer.param_groups for p in g["params"]])


class Average(Callback):
    """An average of weights by hand, which begins with a copy of the module."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = copy.deepcopy(pl_module)
        self.state = {n: v.clone() for n, v in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.copy.parameters(), pl_module.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)


class Clamps(Plain):
    """Clamps one parameter after each step, as CLIP does; prunes and saves in a hook."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.head.bias.data.clamp_(-0.01, 0.01)

    def on_train_epoch_end(self) -> None:
        prune(self, 0.3)
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "inside.ckpt")
        self.seen = largest(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["largest"] = largest(self)


class Whitens(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


def of_module(cls: type[Plain], *attributes: str, **options: Any) -> Callable[[Setting], Any]:
    """Return a case that compares a module's weights, and these attributes."""

    def case(setting: Setting) -> Any:
        _, module = fit(setting, cls, **options)
        return {"weights": state_of(module), **{name: getattr(module, name) for name in attributes}}

    return case


case_clips_in_a_helper = of_module(ClipsInHook, "norms")
case_clips_groups = of_module(ClipsGroups)
case_clips_twice = of_module(ClipsTwice, "norms")
case_steps_by_what_it_sees = of_module(Steps, "seen")
case_forgets_momentum = of_module(Forgets, max_epochs=3)


def case_a_callback_that_keeps_the_trainer(setting: Setting) -> Any:
    callback = KeepsTrainer()
    _, module = fit(setting, Plain, callback)
    return {"norms": callback.norms, "weights": state_of(module)}


def case_reads_on_one_rank(setting: Setting) -> Any:
    callback = Norms()
    _, module = fit(setting, Plain, callback)
    return {"on rank 0": callback.found, "weights": state_of(module)}


def case_averages(setting: Setting) -> Any:
    callback = Average()
    _, module = fit(setting, Plain, callback)
    return {"average": state_of(callback.copy), "state": callback.state, "weights": state_of(module)}


def case_clamps_and_prunes(setting: Setting) -> Any:
    trainer, module = fit(setting, Clamps)
    path = Path(str(trainer.default_root_dir)) / "inside.ckpt"
    return {"seen": module.seen, "saved": dict(read_state_dict(path)), "weights": state_of(module)}


def case_lambdas(setting: Setting) -> Any:
    found: list[Any] = []
    callback = LambdaCallback(on_train_epoch_end=lambda _, module: found.append(largest(module)))
    _, module = fit(setting, Plain, callback)
    return {"found": found, "weights": state_of(module)}


def case_prunes(setting: Setting) -> Any:
    """Train with Lightning's ModelPruning, which ranks all weights and renames them; checkpoints are written while weights
    have new names."""
    found = {}
    for name, options in (("global", {}), ("kept", {"make_pruning_permanent": False})):
        folder = setting.folder / name
        keep = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
        pruning = ModelPruning("l1_unstructured", amount=0.3, **options)  # type: ignore[arg-type]
        _, module = fit(setting, Plain, pruning, keep, max_epochs=3, enable_checkpointing=True)
        found[name] = {"weights": state_of(module), "saved": dict(read_state_dict(Path(keep.last_model_path)))}
    return found


def case_company(setting: Setting) -> Any:
    """Train with a loss that depends on which samples are together, and the default number of microbatches."""
    if setting.holmes is not None:
        setting.holmes = {k: v for k, v in setting.holmes.items() if k != "num_microbatches"}
    return state_of(fit(setting, Whitens)[1])


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1f1b"}),
    "sharded": (4, {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "1f1b", "sharding": "optimizer"}),
    "alone": (1, {"num_microbatches": 2, "save_distributed_checkpoint": True}),
}
NOT_RUN: dict[str | None, dict[str, str]] = {
    "sharded": {"company": "a replica has another batch than the whole", "prunes": "refused"}
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the results of a layout, and of plain Lightning for None, each of one run."""

    @cache
    def run(layout: str | None) -> Any:
        size, holmes = LAYOUTS[layout] if layout else (0, None)
        cases = [name for name in chosen(request, "name") if name not in NOT_RUN.get(layout, ())]
        replicas = size // holmes.get("pipeline_parallel_size", 1) if holmes else 1
        folder = str(tmp_path_factory.mktemp(layout or "plain"))
        payload = {"of": __name__, "cases": cases, "folder": folder, "holmes": holmes, "replicas": replicas}
        return launch(size, "strategy_cases:run_cases", payload, timeout_s=200) if size else run_cases(payload)

    return run


@pytest.mark.xdist_group("tripwires")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_hooks_see_the_whole_module(layout: str, name: str, runs: Any) -> None:
    if name in NOT_RUN.get(layout, ()):
        pytest.skip(NOT_RUN[layout][name])
    first, *others = runs(layout)
    assert_alike(name, runs(None), [first])
    assert_alike(name, runs(None), others, ignore="on rank 0")
