"""Callbacks that report on a run: its speed, where its files are, and a text sample of its model.

Three ordinary Lightning callbacks that work under any strategy.

    Trainer(callbacks=[Throughput(), SampleText(prompt="def "), RunSummary()])
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightning_holmes.checkpoint import read_state_dict
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree


class Throughput(pl.Callback):
    """Logs how many tokens (or samples) per second the whole job trains on.

    A batch's "input_ids", or else its first int32 or int64 tensor with two or more dimensions, is counted as tokens
    and logged as `tokens_per_s`; without such a tensor, samples are counted and logged as `samples_per_s`. The count
    of this process's batch is multiplied by the data-parallel size: all replicas are assumed to have batches of the
    same size.

    The rate is averaged over the last `window` steps. The time between two steps (data loading, saving) counts;
    validation and the first step, which includes one-time setup, do not.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ConfigurationError(f"window={window} is too small: give 1 step or more.")
        self._recent: deque[tuple[float, int]] = deque(maxlen=window)
        self._last_end_s: float | None = None
        self._warm = False
        self._total_s = 0.0
        self._total_units = 0
        self.unit = "tokens"

    @property
    def name(self) -> str:
        return f"{self.unit}_per_s"

    @property
    def mean_per_s(self) -> float | None:
        """The mean rate over all steps but the first; None before there is one."""
        return self._total_units / self._total_s if self._total_s > 0.0 else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._recent.clear()
        self._last_end_s, self._warm = None, False
        self._total_s, self._total_units = 0.0, 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._last_end_s is None:
            self._last_end_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        started_s, self._last_end_s = self._last_end_s, now_s
        if not self._warm or started_s is None:
            self._warm = True
            return
        self.unit, count = count_batch(batch)
        count *= data_parallel_size(trainer)
        self._recent.append((now_s - started_s, count))
        self._total_s += now_s - started_s
        self._total_units += count
        seconds = sum(step_s for step_s, _ in self._recent)
        units = sum(step_units for _, step_units in self._recent)
        rate = units / max(seconds, 1e-9)
        pl_module.log(self.name, rate, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_end_s = None  # the next training step starts the clock again


def data_parallel_size(trainer: pl.Trainer) -> int:
    """The number of processes that see different samples."""
    sampler_kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler_kwargs["num_replicas"]) if sampler_kwargs else 1


def count_batch(batch: Any) -> tuple[str, int]:
    """Return ("tokens", number of tokens) or ("samples", number of samples) for one batch."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return "tokens", batch["input_ids"].numel()
    tensors = tree.tensors_of(batch)
    for tensor in tensors:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim >= 2:
            return "tokens", tensor.numel()
    return "samples", next((len(tensor) for tensor in tensors if tensor.ndim >= 1), 1)


class RunSummary(pl.Callback):
    """Prints a table of the run's results and of where its files are, at the end of fit, on rank 0."""

    def __init__(self) -> None:
        self._start_s = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._start_s = time.perf_counter()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = Table(title="The run", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in self.make_rows(trainer):
            table.add_row(name, Text(value))
        Console().print(table)

    def make_rows(self, trainer: pl.Trainer) -> list[tuple[str, str]]:
        """Return the rows of the table, as pairs of a name and its value."""
        rows = [("steps", str(trainer.global_step))]
        rows += [
            (name, f"{float(value):.4f}")
            for name, value in sorted(trainer.callback_metrics.items())
            if not name.endswith("_per_s") and value.numel() == 1
        ]
        for callback in _callbacks_of(trainer, Throughput):
            if callback.mean_per_s is not None:
                rows.append((f"{callback.unit}/s, mean", f"{callback.mean_per_s:,.0f}"))
        rows.append(("seconds", f"{time.perf_counter() - self._start_s:.1f}"))
        for checkpoint in _callbacks_of(trainer, pl.callbacks.ModelCheckpoint):
            if checkpoint.best_model_path:
                rows.append(("best checkpoint", checkpoint.best_model_path))
            if checkpoint.last_model_path and checkpoint.last_model_path != checkpoint.best_model_path:
                rows.append(("last checkpoint", checkpoint.last_model_path))
        rows += [(type(logger).__name__, folder) for logger in trainer.loggers if (folder := logger_folder(logger))]
        return rows


def logger_folder(logger: pl.loggers.Logger) -> str | None:
    """Return the folder that a logger has written to, or None if it wrote no files."""
    if isinstance(logger, pl.loggers.WandbLogger):
        run_folder = getattr(logger.experiment, "dir", None)  # .../offline-run-<time>-<id>/files
        if isinstance(run_folder, str):
            return str(Path(run_folder).parent)
    return logger.log_dir or logger.save_dir


def _callbacks_of(trainer: pl.Trainer, kind: type[Any]) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


class SampleText(pl.Callback):
    """Prints a text with which the trained model continues `prompt`, at the end of fit, on rank 0.

    For byte-level models with `generate(prompt_ids, max_new_tokens, temperature, generator)`, like `GPT`. While a
    pipeline trains, a process holds only its own layers, so the weights come from ModelCheckpoint's last checkpoint
    (else its best one), loaded into a new module of the same class (`type(module)(**module.hparams)`). Without a
    checkpoint the module itself is used, if this process holds all of it. Errors are reported as warnings: this
    callback never ends a run.
    """

    def __init__(self, prompt: str = "def ", num_bytes: int = 300, temperature: float = 0.8, seed: int = 0) -> None:
        if not prompt or num_bytes < 1 or temperature < 0.0:
            raise ConfigurationError(
                f"prompt={prompt!r}, num_bytes={num_bytes}, temperature={temperature}: give a prompt of at "
                "least one character, at least one byte and a temperature of at least 0."
            )
        self.prompt = prompt
        self.num_bytes = num_bytes
        self.temperature = temperature
        self.seed = seed

    # Not on_train_end: ModelCheckpoint may write its last checkpoint there after this callback has run.
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        try:
            text, source = self.sample(trainer, pl_module)
        except Exception as error:
            pl.utilities.rank_zero_warn(f"SampleText has no text to show: {type(error).__name__}: {error}")
            return
        console = Console()
        console.print(Text(f"\nA text by the model ({source}), after {self.prompt!r}:", style="bold"), soft_wrap=True)
        console.print(Text(text))
        console.print()

    def sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[str, str]:
        """Return the prompt with its continuation, and where the weights came from."""
        if not hasattr(pl_module, "generate"):
            raise TypeError(
                f"{type(pl_module).__name__} has no method generate(prompt_ids, max_new_tokens, temperature, generator)"
            )
        path = _last_checkpoint(trainer)
        if path is not None:
            module, source = _load_module(pl_module, path), str(path)
        elif trainer.world_size == 1 or isinstance(trainer.strategy, pl.strategies.DDPStrategy):
            module, source = pl_module, "from memory"
        else:
            raise FileNotFoundError(
                "no checkpoint file was written, and this process may hold only a part of the module; add "
                "the callback ModelCheckpoint"
            )
        prompt_ids = torch.tensor([list(self.prompt.encode())], device=module.device)
        generator = torch.Generator(device=module.device).manual_seed(self.seed)
        token_ids = module.generate(prompt_ids, self.num_bytes, self.temperature, generator)
        return bytes(token_ids[0].tolist()).decode(errors="replace"), source


def _last_checkpoint(trainer: pl.Trainer) -> Path | None:
    checkpoint = trainer.checkpoint_callback
    for name in ("last_model_path", "best_model_path"):
        path = getattr(checkpoint, name, "")
        if path and Path(path).exists():
            return Path(path)
    return None


def _load_module(pl_module: pl.LightningModule, path: Path) -> Any:
    """A new module on the CPU with the checkpoint's weights; the random state is left unchanged."""
    hparams = {name: value for name, value in pl_module.hparams.items() if not name.startswith("_")}
    state_dict = read_state_dict(path)
    with torch.random.fork_rng(devices=[]):
        module = type(pl_module)(**hparams)
    module.load_state_dict(state_dict)
    return module
