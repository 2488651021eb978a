"""Runs of a module, a callback and a data module that record every call of each of their hooks: its arguments, the epoch, and
the state of all random generators.

Records go to a list outside of the objects, so that a hook that is called on a copy is recorded, too. All replicas read the
same batches, so every rank must record what plain Lightning records in one process.
"""

import hashlib
import inspect
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

from lightning_holmes import HolmesStrategy

warnings.filterwarnings("ignore")

NOTES: list[str] = []
_QUIET = {
    *("backward", "configure_sharded_model", "tbptt_split_batch", "optimizer_zero_grad", "setup_batch", "on_exception")
}
_HOOKS = (
    *("prepare_data", "setup", "teardown", "transfer_batch_to_device", "lr_scheduler_step", "optimizer_step"),
    *("configure_gradient_clipping", "configure_optimizers", "configure_callbacks", "configure_model"),
)


def hooks_of(base: type) -> list[str]:
    """Return the names of the hooks that ``base`` declares."""
    own = [name for name in dir(base) if name.startswith("on_") or name in _HOOKS]
    return [name for name in own if callable(getattr(base, name)) and name not in _QUIET]


def describe(value: Any) -> str:
    """Describe a value by a text that is equal in two runs: tensors by shape and sum, scalar tensors (results, which are
    rounded differently) by shape alone."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}" + (f" {value.double().sum():.9f}" if value.ndim else "")
    if isinstance(value, (int, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, dict):
        known = {key: v for key, v in value.items() if key in ("loss", "x", "y")}
        return f"{{{', '.join(f'{key}: {describe(v)}' for key, v in known.items())}}}"
    return type(value).__name__ if not isinstance(value, pl.Trainer) else f"trainer({value.state.stage})"


def note(owner: str, hook: str, arguments: Any, trainer: Any) -> None:
    """Append a line to NOTES."""
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    digest = hashlib.md5(pickle.dumps(state)).hexdigest()[:6]
    epoch = "" if trainer is None else f" epoch {trainer.current_epoch} step {trainer.global_step}"
    NOTES.append(f"{owner}.{hook}({', '.join(map(describe, arguments))}){epoch} random {digest}")


def noting(base: type, owner: str) -> Callable[[type], type]:
    """Return a class decorator: each hook of ``base`` records its call and then does what it did before."""

    def decorate(decorated: type) -> type:
        for name in hooks_of(base):
            setattr(decorated, name, _noting(decorated, name, owner))
        return decorated

    return decorate


def _noting(decorated: type, name: str, owner: str) -> Any:
    own = getattr(decorated, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = next((a for a in args if isinstance(a, pl.Trainer)), None) or getattr(self, "_trainer", None)
        note(owner, name, [*args, *kwargs.values()], trainer)
        return own(self, *args, **kwargs)

    hook.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # Lightning looks at it
    return hook


class Net(pl.LightningModule):
    """Four layers; no random numbers in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        hidden = batch["x"]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden - batch["y"]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def pairs(count: int) -> Any:
    drawn = torch.randn(2, count, 8, generator=torch.Generator().manual_seed(count))
    return [{"x": x, "y": y} for x, y in zip(*drawn, strict=True)]


def split_loader(count: int, **options: Any) -> DataLoader[Any]:
    """Return a loader over a half of the data that is drawn anew at each call."""
    part, _ = random_split(pairs(2 * count), [count, count])
    return DataLoader(part, batch_size=4, **options)


class Loaders:
    """The loaders of a module or a data module: each call draws other samples and is recorded."""

    several = 1

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        return split_loader(16, shuffle=True)

    def val_dataloader(self) -> Any:
        self._note("val_dataloader")
        return split_loader(8) if self.several == 1 else [split_loader(8), split_loader(4)]

    def test_dataloader(self) -> Any:
        self._note("test_dataloader")
        return split_loader(8)

    def predict_dataloader(self) -> Any:
        self._note("predict_dataloader")
        return split_loader(8)

    def _note(self, name: str) -> None:
        owner: Any = self
        note("data", name, [], owner.trainer)


@noting(pl.LightningModule, "module")
class NotingModule(Loaders, Net):
    pass


@noting(pl.LightningModule, "module")
class BuiltLate(Loaders, Net):
    """Builds its layers in configure_model under ``fork_rng``, since building without memory draws no random numbers."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if "layers" not in self._modules:
            with torch.random.fork_rng():
                self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


@noting(pl.LightningModule, "module")
class WithoutData(Net):
    pass


@noting(pl.LightningDataModule, "data")
class NotingData(Loaders, pl.LightningDataModule):
    pass


@noting(Callback, "callback")
class NotingCallback(Callback):
    pass


class Setting:
    """Where a run happens: in plain Lightning (``holmes`` is None) or under HolmesStrategy."""

    def __init__(self, folder: Path, holmes: dict[str, Any] | None) -> None:
        self.folder, self.holmes = folder, holmes

    @property
    def is_first(self) -> bool:
        return self.holmes is None or os.environ.get("RANK", "0") == "0"

    def trainer(self, **options: Any) -> pl.Trainer:
        given: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "default_root_dir": self.folder}
        given["devices"] = 1 if self.holmes is None else int(os.environ.get("WORLD_SIZE", 1))
        if self.holmes is not None:
            given["strategy"] = HolmesStrategy(**self.holmes)
        return quiet_trainer(**(given | options | {"callbacks": [NotingCallback(), *options.get("callbacks", [])]}))


def sanity(setting: Setting) -> None:
    setting.trainer().fit(NotingModule())


def data_module(setting: Setting) -> None:
    setting.trainer(max_epochs=1, gradient_clip_val=1.0).fit(WithoutData(), datamodule=NotingData())


def reloading(setting: Setting) -> None:
    trainer = setting.trainer(
        max_epochs=9, reload_dataloaders_every_n_epochs=4, check_val_every_n_epoch=3, limit_train_batches=1
    )
    trainer.fit(NotingModule())


def no_sanity(setting: Setting) -> None:
    setting.trainer(num_sanity_val_steps=0, val_check_interval=0.5, accumulate_grad_batches=2).fit(NotingModule())


def several_loaders(setting: Setting) -> None:
    module = NotingModule()
    module.several = 2
    trainer = setting.trainer(max_epochs=1, limit_train_batches=2)
    trainer.fit(module)
    trainer.validate(module, verbose=False)


def evaluations(setting: Setting) -> None:
    trainer, module = setting.trainer(), NotingModule()
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)


def overfit(setting: Setting) -> None:
    setting.trainer(overfit_batches=1).fit(NotingModule())


def fast_dev_run(setting: Setting) -> None:
    setting.trainer(fast_dev_run=True).fit(NotingModule())


def resuming(setting: Setting) -> None:
    folder = setting.folder / "checkpoints"
    saves = ModelCheckpoint(folder, filename="first", save_top_k=1, every_n_epochs=1)
    setting.trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saves]).fit(NotingModule())
    pl.seed_everything(7, verbose=False)
    setting.trainer(max_epochs=2).fit(NotingModule(), ckpt_path=folder / "first.ckpt")


def built_late(setting: Setting) -> None:
    folder = setting.folder / "checkpoints"
    saves = ModelCheckpoint(folder, filename="first", save_top_k=1, every_n_epochs=1)
    setting.trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saves]).fit(BuiltLate())
    trainer, module = setting.trainer(reload_dataloaders_every_n_epochs=1), BuiltLate()
    trainer.fit(module, ckpt_path=folder / "first.ckpt")
    trainer.test(module, verbose=False)
    trainer.predict(module)


def given_loaders(setting: Setting) -> None:
    setting.trainer(max_epochs=1).fit(WithoutData(), split_loader(8, shuffle=True), split_loader(8))


RUNS = (
    *(sanity, data_module, reloading, no_sanity, several_loaders, evaluations, overfit, fast_dev_run, resuming),
    *(built_late, given_loaders),
)


def notes_of_all(payload: dict[str, Any]) -> dict[str, list[str]]:
    """Return what each run has recorded, by the run's name."""
    found = {}
    for run in RUNS:
        if run.__name__ not in payload["runs"]:
            continue
        NOTES.clear()
        folder = Path(payload["folder"]) / run.__name__
        pl.seed_everything(3, verbose=False)
        try:
            run(Setting(folder, payload["holmes"]))
        except Exception as error:
            NOTES.append(f"{type(error).__name__}: {error}")
        found[run.__name__] = list(NOTES)
        shutil.rmtree(folder, ignore_errors=True)
    return found
