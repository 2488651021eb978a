"""The undocumented parts of Lightning and torchmetrics that this package uses; tests/test_lightning_private.py fails when one of
them changes.

No other file imports a name with a leading underscore from these libraries, or reads one on their objects. Constants in capitals
are names: most of attributes that lightning_holmes.replacements replaces for the duration of a run.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchmetrics import Metric

from lightning_holmes.lightning_package import fabric, pl

# processes and collectives

SubprocessLauncher = pl.strategies.launchers.subprocess_script._SubprocessScriptLauncher
"""The launcher that starts the other processes of this host with the same script, unless another launcher does, and calls the Trainer's function."""

set_num_threads = fabric.utilities.distributed._set_num_threads_if_needed
"""``(num_processes)``: set torch's number of threads so that this host's processes share its cores, unless OMP_NUM_THREADS is set."""

init_dist_connection = fabric.utilities.distributed._init_dist_connection
"""``(cluster_environment, backend, **options)``: form the default process group; the options are torch's."""

default_backend = fabric.utilities.distributed._get_default_process_group_backend_for_device
"""``(device)`` to the backend that Lightning's strategies use on this device: "nccl" or "gloo"."""

distributed_is_initialized = fabric.utilities.distributed._distributed_is_initialized
"""``()``: whether there is a default process group."""

reduce_over = fabric.utilities.distributed._sync_ddp_if_available
"""``(tensor, group, reduce_op=)``: the sum or mean of a tensor over a group, as ``Strategy.reduce`` returns it."""

gather_over = fabric.utilities.distributed._all_gather_ddp_if_available
"""``(tensor, group=, sync_grads=)``: the tensors of all ranks of a group, stacked, as ``Strategy.all_gather`` returns them."""

# trainers

FIND_CHECKPOINT = "_parse_ckpt_path"
"""A method of :func:`checkpoint_connector`: ``(state_fn, ckpt_path, ...)`` to the path of a checkpoint. It is called once per
Trainer call, before the strategy is set up."""

FIND_LAST_CHECKPOINTS = "_find_last_checkpoints"
"""A method of ModelCheckpoint: ``(trainer)`` to the paths of the "last" checkpoints in its folder; called by FIND_CHECKPOINT."""

ON_SIGTERM = "_sigterm_notifier_fn"
"""A method of :func:`signal_connector`: the handler ``(signum, frame)`` of SIGTERM."""

ON_REQUEUE = "_slurm_sigusr_handler_fn"
"""A method of :func:`signal_connector`: the handler ``(signum, frame)`` of SLURM's signal; it saves and requests a requeue."""

BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""A method of the training epoch loop: ``()``. If there are several ranks, all call it before each batch: rank 0 broadcasts whether it has
received SIGTERM, and if so the method raises SIGTERMException."""


def checkpoint_connector(trainer: "pl.Trainer") -> Any:
    """The object that finds and opens checkpoints for a trainer."""
    return trainer._checkpoint_connector


def signal_connector(trainer: "pl.Trainer") -> Any:
    """The object that handles a trainer's signals; setting its ``received_sigterm`` ends the loops."""
    return trainer._signal_connector


def divides_data(trainer: "pl.Trainer") -> bool:
    """Whether the trainer gives each replica its part of the data; with ``Trainer(use_distributed_sampler=False)`` the data sets do."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def synchronises_batch_norm(trainer: "pl.Trainer") -> bool:
    """Whether ``Trainer(sync_batchnorm=True)``, or a plugin for it, was given; the trainer tells the strategy alone."""
    return trainer.strategy._layer_sync is not None  # type: ignore[attr-defined]


def read_folders(is_ours: Callable[[Any], bool], read: Callable[..., dict[str, Any]]) -> None:
    """Make ``load_from_checkpoint``, and every strategy that reads one file, call ``read(path, map_location=, weights_only=)``
    for a path for which ``is_ours`` is true: a folder, which they would refuse. Other paths are read as before."""
    for place in (pl.core.saving, fabric.plugins.io.torch_io):
        place.pl_load = _reading(place.pl_load, is_ours, read)  # type: ignore[attr-defined]


def _reading(read_file: Callable[..., Any], is_ours: Callable[[Any], bool], read: Callable[..., Any]) -> Any:
    @functools.wraps(read_file)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        return (read if is_ours(path_or_url) else read_file)(path_or_url, *args, **kwargs)

    return load


def checkpoint_folder(callback: pl.callbacks.ModelCheckpoint, trainer: "pl.Trainer") -> str:
    """The folder that a ModelCheckpoint writes to; known even before its ``setup``."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def active_loop(trainer: "pl.Trainer") -> Any:
    """The loop that a trainer is running; None if it is running none."""
    return trainer._active_loop


def config_value(cli: Any, config: Any, key: str) -> Any:
    """The value of ``key`` in a LightningCLI's configuration of the running subcommand; None if it is not given."""
    return cli._get(config, key)


# loops and their loaders


def restore_loaders(loop: Any) -> None:
    """If a fit loop resumes from a checkpoint with loader states, load them into its loaders and start their pass."""
    loader = loop._combined_loader
    if loader is None or not loop.restarting or not loop._combined_loader_states_to_load:
        return
    for each in loader.flattened:
        fabric.utilities.data._set_sampler_epoch(each, loop.epoch_progress.current.processed)
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def data_fetcher(loop: Any) -> Any:
    """The iterator that a fit loop takes its batches from; ``iter`` of it starts a new pass."""
    return loop._data_fetcher


def loaders_of(loop: Any) -> list[Any]:
    """The loaders of a fit loop or an evaluation loop, as a flat list."""
    return list(loop._combined_loader.flattened)


BEFORE_FIT = "run-stage"
"""The name of the strategy's barrier between restoring and the loops of a Trainer call."""


def wrapped_sampler(sampler: Any) -> Any:
    """The user's sampler inside the DistributedSampler that Lightning made around it; ``sampler`` itself if Lightning made none."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


def training_arguments(trainer: "pl.Trainer", batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The arguments that Lightning passes to ``training_step`` after the batch."""
    given = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    return tuple(value for name, value in given.items() if name != "batch")


# modules

TRAINER, FABRIC = "_trainer", "_fabric"
"""The attributes that attach a LightningModule to a Trainer or a Fabric; they are not part of the module's state."""


def trainer_of(module: "pl.LightningModule") -> Any:
    """A module's trainer; None if it has none."""
    return module._trainer


def set_trainer(module: "pl.LightningModule", trainer: Any) -> None:
    """Attach a module to a trainer, or detach it if None; submodules are not changed."""
    module._trainer = trainer


def set_device_mesh(module: "pl.LightningModule", mesh: Any) -> None:
    """Set the ``device_mesh`` of a module, as ModelParallelStrategy does."""
    module._device_mesh = mesh


def is_compiled_module(module: "pl.LightningModule") -> bool:
    """Whether the module that was given to a trainer was compiled by ``torch.compile``."""
    return getattr(module, "_compiler_ctx", None) is not None


MODULE_HOOK = "_call_lightning_module_hook"
"""A function of :func:`hook_calls`: ``(trainer, hook_name, *arguments)``; Lightning calls all hooks of a LightningModule through it."""


def hook_calls() -> Any:
    """The Python module with Lightning's functions that call hooks; the loops look the functions up in it at each call."""
    return pl.trainer.call


# optimizers and precision

AFTER_CLOSURE = "_after_closure"
"""A method of a precision plugin: ``(module, optimizer)``, called between the closure and the step; it runs hooks and clips gradients."""

optimizers_to_device = fabric.utilities.optimizer._optimizers_to_device
"""``(optimizers, device)``: move the optimizers' states to the device."""

handles_unscaling = fabric.plugins.precision.amp._optimizer_handles_unscaling
"""``(optimizer)``: whether the optimizer unscales gradients itself."""


def reset_optimizers(strategy: Any) -> None:
    """Drop a strategy's optimizers and schedulers before it is set up with new ones."""
    strategy._reset_optimizers_and_schedulers()


def collects_checkpoint() -> bool:
    """Whether the caller runs inside Lightning's ``dump_checkpoint``, which collects a checkpoint and then passes it on."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "dump_checkpoint":
            return str(frame.f_globals.get("__name__", "")).endswith("trainer.connectors.checkpoint_connector")
        frame = frame.f_back
    return False


# callbacks and loggers


def average_model(callback: Any) -> Any:
    """The average that WeightAveraging (an AveragedModel) or StochasticWeightAveraging (a module) keeps; None before it is made."""
    return callback._average_model


def has_experiment(logger: Any) -> bool:
    """Whether a WandbLogger has begun its run."""
    return logger._experiment is not None


def without_anonymous(logger: Any) -> None:
    """Keep a WandbLogger that has not begun its run from passing ``anonymous=None``: wandb warns about the option whatever its value."""
    if logger._wandb_init.get("anonymous") is None:
        logger._wandb_init.pop("anonymous", None)


def log_offline(logger: Any) -> bool:
    """Make a WandbLogger that has not begun its run keep it on disk; return False if it was set to upload checkpoints, which is dropped."""
    logger._wandb_init["mode"] = "offline"
    wanted, logger._log_model = logger._log_model, False
    return not wanted


# metrics

UPDATE_COUNT = "_update_count"
"""The attribute of a Metric behind ``update_count``: the number of ``update`` calls."""


def batch_value(metric: Metric) -> Any:
    """The value that the last ``forward`` of a metric returned; ``self.log(name, metric, on_step=True)`` logs it."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Set the value that :func:`batch_value` returns."""
    metric._forward_cache = value


def reductions(metric: Metric) -> list[Any]:
    """For each state of a metric the function that merges it across processes, or None."""
    return list(metric._reductions.values())


def set_update_count(metric: Metric, count: int) -> None:
    """Set the number of updates of a metric, and drop its cached ``compute`` result."""
    metric._update_count = count
    metric._computed = None


def forget_computed(metric: Metric) -> None:
    """Drop the cached result, so that the next ``compute`` starts from the metric's states."""
    metric._computed = None


@contextmanager
def not_syncing(metric: Metric) -> Iterator[None]:
    """A context in which ``compute`` gathers nothing from other ranks."""
    should, metric._to_sync = metric._to_sync, False
    try:
        yield
    finally:
        metric._to_sync = should


def build_trainers_for_one_cpu() -> None:
    """Build every further Trainer of this process for one process on the CPU, whatever device, strategy, precision and launcher it is given.
    An optimizer node needs this: it runs a script that was written for other hosts."""

    class OneCpu(pl.trainer.connectors.accelerator_connector._AcceleratorConnector):
        def __init__(self, **_: Any) -> None:
            super().__init__(
                accelerator="cpu", devices=1, plugins=[fabric.plugins.environments.lightning.LightningEnvironment()]
            )

    vars(pl.trainer.trainer)["_AcceleratorConnector"] = OneCpu
