"""Everything of Lightning and torchmetrics that this package uses and they do not document; tests/test_lightning_private.py
fails when it changes.

No other file imports a name with a leading underscore from them, or reads one on their objects. The names in capitals
are attributes that are exchanged while a run lasts, by lightning_holmes.strategy.compat.replacements.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torchmetrics import Metric

# processes and collectives

SubprocessLauncher = _SubprocessScriptLauncher
"""Starts the other processes of this host as the same script, where nobody else does, and calls what a Trainer runs."""

set_num_threads = _set_num_threads_if_needed
"""``(num_processes)``: of torch, so many that this host's processes share its cores; where the user has not set OMP_NUM_THREADS."""

init_dist_connection = _init_dist_connection
"""``(cluster_environment, backend, **options)``: join the default process group with these options of torch's."""

default_backend = _get_default_process_group_backend_for_device
"""``(device)`` to the backend that Lightning's strategies take on it: "nccl" or "gloo"."""

distributed_is_initialized = _distributed_is_initialized
"""``()``: whether there is a default process group."""

reduce_over = _sync_ddp_if_available
"""``(tensor, group, reduce_op=)``: the sum, or the mean, of a tensor over a group, as ``Strategy.reduce`` gives it."""

gather_over = _all_gather_ddp_if_available
"""``(tensor, group=, sync_grads=)``: a group's tensors, stacked, as ``Strategy.all_gather`` gives them."""

# trainers

FIND_CHECKPOINT = "_parse_ckpt_path"
"""Of :func:`checkpoint_connector`: ``(state_fn, ckpt_path, ...)`` to the path of a checkpoint, asked once a Trainer call,
before the strategy is set up."""

FIND_LAST_CHECKPOINTS = "_find_last_checkpoints"
"""Of a ModelCheckpoint: ``(trainer)`` to the paths in its folder that are called last; asked by FIND_CHECKPOINT."""

ON_SIGTERM = "_sigterm_notifier_fn"
"""Of :func:`signal_connector`: the handler ``(signum, frame)`` of SIGTERM."""

ON_REQUEUE = "_slurm_sigusr_handler_fn"
"""Of :func:`signal_connector`: the handler ``(signum, frame)`` of SLURM's signal, which saves and asks for a requeue."""

BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""Of a training epoch loop: ``()``, called by all ranks before each batch, where there are several; rank 0 tells there
that it is to end, which raises SIGTERMException."""


def checkpoint_connector(trainer: "pl.Trainer") -> Any:
    """What finds and opens checkpoints for a trainer."""
    return trainer._checkpoint_connector


def signal_connector(trainer: "pl.Trainer") -> Any:
    """What a trainer's signals are handled by; ``received_sigterm`` ends its loops."""
    return trainer._signal_connector


def read_folders(is_ours: Callable[[Any], bool], read: Callable[..., dict[str, Any]]) -> None:
    """Have ``load_from_checkpoint``, and every strategy that reads one file, get ``read(path, map_location=, weights_only=)``
    of a path that ``is_ours``: a folder, which they would refuse. What else they read they read as before."""
    for place in (saving, torch_io):
        place.pl_load = _reading(place.pl_load, is_ours, read)  # type: ignore[attr-defined]


def _reading(read_file: Callable[..., Any], is_ours: Callable[[Any], bool], read: Callable[..., Any]) -> Any:
    @functools.wraps(read_file)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        return (read if is_ours(path_or_url) else read_file)(path_or_url, *args, **kwargs)

    return load


def checkpoint_folder(callback: ModelCheckpoint, trainer: "pl.Trainer") -> str:
    """The folder that a ModelCheckpoint writes to, also before its ``setup``."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def active_loop(trainer: "pl.Trainer") -> Any:
    """The loop of what a trainer is running; None for none."""
    return trainer._active_loop


def config_value(cli: Any, config: Any, key: str) -> Any:
    """Of a LightningCLI's configuration, what belongs to the subcommand that runs; None where it is not given."""
    return cli._get(config, key)


# loops and their loaders


def restore_loaders(loop: Any) -> None:
    """Give a fit loop's stateful loaders the states of a checkpoint, and begin their pass, if it resumes from some."""
    loader = loop._combined_loader
    if loader is None or not loop.restarting or not loop._combined_loader_states_to_load:
        return
    for each in loader.flattened:
        _set_sampler_epoch(each, loop.epoch_progress.current.processed)
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def data_fetcher(loop: Any) -> Any:
    """What a fit loop takes its batches from: an iterator, which ``iter`` begins anew."""
    return loop._data_fetcher


def loaders_of(loop: Any) -> list[Any]:
    """The training loaders of a fit loop, one after the other."""
    return list(loop._combined_loader.flattened)


BEFORE_FIT = "run-stage"
"""The name of the strategy's barrier after everything is restored, and before the loops of a Trainer call run."""


def wrapped_sampler(sampler: Any) -> Any:
    """The sampler whose samples a DistributedSampler that Lightning has made deals out, itself where it draws them."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


def training_arguments(trainer: "pl.Trainer", batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """What Lightning gives ``training_step`` after this batch."""
    given = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    return tuple(value for name, value in given.items() if name != "batch")


# modules

TRAINER, FABRIC = "_trainer", "_fabric"
"""The attributes of a LightningModule that attach it to a Trainer or a Fabric, which are no state of its own."""


def trainer_of(module: "pl.LightningModule") -> Any:
    """A module's trainer; None where it is attached to none."""
    return module._trainer


def set_trainer(module: "pl.LightningModule", trainer: Any) -> None:
    """Attach a module to a trainer, or to none; modules inside it stay."""
    module._trainer = trainer


def set_device_mesh(module: "pl.LightningModule", mesh: Any) -> None:
    """Give a module what its ``device_mesh`` shows, as ModelParallelStrategy does."""
    module._device_mesh = mesh


def is_compiled_module(module: "pl.LightningModule") -> bool:
    """Whether a trainer was given what ``torch.compile`` made of a module."""
    return getattr(module, "_compiler_ctx", None) is not None


MODULE_HOOK = "_call_lightning_module_hook"
"""Of :func:`hook_calls`: ``(trainer, hook_name, *arguments)``, through which all hooks of a LightningModule are called."""


def hook_calls() -> Any:
    """Lightning's module of the functions that call hooks; the loops look them up there at each call."""
    return call


# optimizers and precision

AFTER_CLOSURE = "_after_closure"
"""Of a precision plugin: ``(module, optimizer)``, called between the closure and the step; runs hooks and clips."""

optimizers_to_device = _optimizers_to_device
"""``(optimizers, device)``: move their states."""

handles_unscaling = _optimizer_handles_unscaling
"""``(optimizer)``: whether the optimizer takes the loss scale out of gradients itself."""


def reset_optimizers(strategy: Any) -> None:
    """Let go of a strategy's optimizers and schedulers before it is set up with new ones."""
    strategy._reset_optimizers_and_schedulers()


def collects_checkpoint() -> bool:
    """Whether Lightning is collecting a checkpoint at this moment, up the stack, which it hands on when it has collected it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "dump_checkpoint":
            return str(frame.f_globals.get("__name__", "")).endswith("trainer.connectors.checkpoint_connector")
        frame = frame.f_back
    return False


# callbacks and loggers


def average_model(callback: Any) -> Any:
    """The average that WeightAveraging (an AveragedModel) or StochasticWeightAveraging (a module) keeps; None before."""
    return callback._average_model


def averaging_functions(callback: Any) -> list[tuple[Any, bool]]:
    """The functions of its own by which such a callback averages; with each, whether it takes lists of tensors. Empty: torch's."""
    average = callback._average_model
    if hasattr(callback, "_avg_fn"):
        return [(callback._avg_fn, False)]
    found = [(average.avg_fn, False), (average.multi_avg_fn, True)]
    return [(function, is_multiple) for function, is_multiple in found if function is not None]


def has_experiment(logger: Any) -> bool:
    """Whether a WandbLogger has begun its run."""
    return logger._experiment is not None


def without_anonymous(logger: Any) -> None:
    """Let a WandbLogger that has not begun not pass on ``anonymous=None``: wandb warns of the option whatever it is."""
    if logger._wandb_init.get("anonymous") is None:
        logger._wandb_init.pop("anonymous", None)


def log_offline(logger: Any) -> bool:
    """Let a WandbLogger that has not begun keep its run on disk; False where it was asked to upload checkpoints."""
    logger._wandb_init["mode"] = "offline"
    wanted, logger._log_model = logger._log_model, False
    return not wanted


# metrics

UPDATE_COUNT = "_update_count"
"""The attribute of a Metric that its ``update_count`` shows: changed by each ``update``."""


def batch_value(metric: Metric) -> Any:
    """What the last ``forward`` of a metric returned; ``self.log(name, metric, on_step=True)`` logs it."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Change what :func:`batch_value` gives."""
    metric._forward_cache = value


def reductions(metric: Metric) -> list[Any]:
    """How each of a metric's states is merged with another's: a function, or None."""
    return list(metric._reductions.values())


def set_update_count(metric: Metric, count: int) -> None:
    """Say how often a metric's states were updated; what it has computed is forgotten."""
    metric._update_count = count
    metric._computed = None


def forget_computed(metric: Metric) -> None:
    """Let the next ``compute`` begin from the metric's states."""
    metric._computed = None


@contextmanager
def not_syncing(metric: Metric) -> Iterator[None]:
    """Inside, ``compute`` gathers nothing from other ranks."""
    should, metric._to_sync = metric._to_sync, False
    try:
        yield
    finally:
        metric._to_sync = should


def build_trainers_for_one_cpu() -> None:
    """From now on each Trainer of this process is built for one process on the CPU, whatever device, strategy, precision and launcher it
    is told: an optimizer node runs a script that was written for other hosts."""

    class OneCpu(_AcceleratorConnector):
        def __init__(self, *, precision: Any = None, plugins: Any = None, **_: Any) -> None:
            super().__init__(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
            given = plugins if isinstance(plugins, (list, tuple)) else [plugins]
            is_plugin = any(isinstance(plugin, Precision) for plugin in given)
            self.declared = None if is_plugin else _convert_precision_to_unified_args(precision) or "32-true"

    vars(trainer_module)["_AcceleratorConnector"] = OneCpu


def declared_precision(trainer: "pl.Trainer") -> str | None:
    """What a Trainer of :func:`build_trainers_for_one_cpu` was told, in Lightning's present words; None where a plugin says it."""
    connector: Any = trainer._accelerator_connector
    found: str | None = connector.declared
    return found
