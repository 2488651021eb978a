"""The private behaviour on which lightning_holmes/lightning_private.py relies; a failure here means that Lightning or
torchmetrics has changed it."""

import argparse
import inspect
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_holmes import lightning_private as private

pytestmark = pytest.mark.versions


def trainer_for(folder: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **(defaults | quiet | options))


# processes and collectives


def test_the_launcher_is_the_first_that_a_trainer_calls_and_is_given_the_trainer(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Launcher(private.SubprocessLauncher):
        def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            seen.append((trainer, trainer.checkpoint_callbacks, trainer.strategy.lightning_module is not None))
            return super().launch(function, *args, trainer=trainer, **kwargs)

    class Strategy(DDPStrategy):
        def _configure_launcher(self) -> None:
            self._launcher = Launcher(self.cluster_environment, num_processes=1, num_nodes=1)

    trainer = trainer_for(tmp_path, strategy=Strategy(process_group_backend="gloo"))
    assert isinstance(trainer.strategy.launcher, Launcher) and trainer.strategy.launcher.procs == []
    try:
        trainer.fit(BoringModel())
    finally:
        dist.destroy_process_group()
        os.environ.pop("LOCAL_RANK", None)
    assert seen == [(trainer, [], True)]
    trainer.strategy.launcher.kill(signal.SIGTERM)  # no process of another job


def test_the_processes_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: found.append(number))
    found: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    private.set_num_threads(2)
    assert found == []  # the user's setting takes precedence
    monkeypatch.delenv("OMP_NUM_THREADS")
    private.set_num_threads(2)
    assert found == [max(1, len(os.sched_getaffinity(0)) // 2)]


def test_a_group_is_joined_with_torchs_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    environment = LightningEnvironment()
    private.init_dist_connection(environment, "gloo", timeout="later")
    assert given == {"backend": "gloo", "rank": 0, "world_size": 1, "timeout": "later"}
    assert os.environ.pop("MASTER_ADDR") == environment.main_address and os.environ.pop("MASTER_PORT")
    assert private.default_backend(torch.device("cpu")) == "gloo"
    assert private.default_backend(torch.device("cuda")) == "nccl"
    assert private.distributed_is_initialized() is False


def test_tensors_are_reduced_and_gathered_over_a_group(alone: None) -> None:
    assert private.distributed_is_initialized() is True
    group = dist.new_group([0])
    assert float(private.reduce_over(torch.tensor(3.0), group, reduce_op="mean")) == 3.0
    assert float(private.reduce_over(torch.tensor(3.0), group, reduce_op="sum")) == 3.0
    assert private.gather_over(torch.ones(2), group=group, sync_grads=False).shape == (1, 2)


# trainers


def test_a_checkpoint_is_found_by_methods_that_objects_may_have_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    trainer = trainer_for(tmp_path, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(BoringModel())
    connector = private.checkpoint_connector(trainer)
    found: list[Any] = []
    find, find_last = getattr(connector, private.FIND_CHECKPOINT), getattr(callback, private.FIND_LAST_CHECKPOINTS)

    def noting_find(state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((list(set_up), ckpt_path, find(state_fn, ckpt_path, *args, **kwargs)))
        return found[-1][-1]

    def noting_last(given: Any) -> set[str]:
        found.append((given, find_last(given)))
        return {str(tmp_path / "last.ckpt")}

    setattr(connector, private.FIND_CHECKPOINT, noting_find)
    setattr(callback, private.FIND_LAST_CHECKPOINTS, noting_last)
    set_up: list[str] = []
    monkeypatch.setattr(type(trainer.strategy), "setup_environment", lambda self: set_up.append("now"))
    trainer.validate(BoringModel(), ckpt_path="last", verbose=False)
    last = str(tmp_path / "last.ckpt")
    assert found == [(trainer, {last}), ([], "last", last)]
    assert set_up
    assert private.checkpoint_folder(ModelCheckpoint(), trainer_for(tmp_path)) == str(tmp_path / "checkpoints")


def test_files_are_opened_by_one_function_that_two_modules_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (saving, torch_io):
        monkeypatch.setattr(place, "pl_load", place.pl_load)  # so that it is restored afterwards
    asked: list[Any] = []

    def read(path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        asked.append((path, callable(map_location), weights_only))
        return {"state_dict": BoringModel().state_dict(), "pytorch-lightning_version": pl.__version__}

    private.read_folders(lambda path: path == str(tmp_path), read)
    BoringModel.load_from_checkpoint(str(tmp_path), weights_only=True)
    torch_io.TorchCheckpointIO().load_checkpoint(str(tmp_path))
    assert asked == [(str(tmp_path), True, True), (str(tmp_path), True, None)]
    torch.save({"a": 1}, tmp_path / "file")
    assert torch_io.TorchCheckpointIO().load_checkpoint(tmp_path / "file") == {"a": 1} and len(asked) == 2


def test_signals_are_handled_by_methods_that_a_connector_may_have_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    connector = private.signal_connector(trainer)
    received: list[int] = []
    assert callable(getattr(connector, private.ON_SIGTERM)) and callable(getattr(connector, private.ON_REQUEUE))
    setattr(connector, private.ON_SIGTERM, lambda signum, frame: received.append(signum))

    class Signalled(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.fit(Signalled())
    assert received == [signal.SIGTERM]
    assert connector.received_sigterm is False
    assert list(inspect.signature(getattr(connector, private.ON_REQUEUE)).parameters) == ["signum", "_"]


def test_a_message_goes_ahead_of_each_batch_where_there_is_a_process_group(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, loop_calls = trainer_for(tmp_path), []

    def told() -> None:
        loop_calls.append(trainer.fit_loop.epoch_loop.batch_idx)
        if len(loop_calls) == 2:
            raise SIGTERMException

    assert callable(getattr(trainer.fit_loop.epoch_loop, private.BEFORE_BATCH))
    setattr(trainer.fit_loop.epoch_loop, private.BEFORE_BATCH, told)
    monkeypatch.setattr(type(trainer.strategy), "world_size", 2, raising=False)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    with pytest.raises(SIGTERMException):
        trainer.fit(BoringModel())
    assert len(loop_calls) == 2


def test_the_active_loop_is_that_of_what_runs(tmp_path: Path) -> None:
    seen = set()

    class Looks(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.add(private.active_loop(self.trainer))
            return super().validation_step(batch, batch_idx)

    trainer = trainer_for(tmp_path)
    assert private.active_loop(trainer) is None
    trainer.validate(Looks(), verbose=False)
    assert seen == {trainer.validate_loop}


def test_a_command_line_has_the_methods_that_are_overridden_and_reads_values_of_its_subcommand(tmp_path: Path) -> None:
    added: list[str] = []

    class CLI(LightningCLI):
        def _add_subcommands(self, parser: Any, **kwargs: Any) -> None:
            super()._add_subcommands(parser, **kwargs)
            parser._subcommands_action.add_subcommand("other", type(parser)())
            added.extend(parser._subcommands_action.choices)

        def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
            if subcommand == "validate":
                return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
            return self.init_parser(**kwargs)

        def _parse_ckpt_path(self) -> None:
            added.append("no path")

        def _run_subcommand(self, subcommand: str) -> None:
            added.append(subcommand)

    cli = CLI(BoringModel, args=["validate", "--trainer.accelerator=cpu", "--trainer.logger=false"])
    assert {"fit", "validate", "test", "predict", "other"} < set(added) and added[-2:] == ["no path", "validate"]
    for name, parser in cli.parser._subcommands_action.choices.items():
        assert ("--trainer.accelerator" in parser._option_string_actions) == (name == "validate"), name
    assert isinstance(private.config_value(cli, cli.config_init, "model"), BoringModel)
    assert private.config_value(cli, cli.config_init, "nothing") is None
    assert isinstance(cli.parser, argparse.ArgumentParser)


# loops and their loaders


class Counted(DataLoader):  # type: ignore[type-arg]
    """A loader with a state."""

    state: Any = None

    def state_dict(self) -> dict[str, int]:
        return {"passed": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_training_step_is_given_what_it_takes(tmp_path: Path) -> None:
    class Takes(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            given.append(private.training_arguments(self.trainer, batch, batch_idx))

    class TakesBatch(Takes):
        def training_step(self, batch: Any) -> Any:
            return self.step(batch)

    given: list[Any] = []
    for module in (Takes(), TakesBatch()):
        trainer_for(tmp_path, limit_train_batches=2, max_epochs=1).fit(module)
    assert given == [(0,), (1,), (), ()]


def test_a_pass_over_the_training_loaders_begins_anew_with_iter(tmp_path: Path) -> None:
    seen: list[Any] = []
    loader = DataLoader(RandomDataset(32, 4))

    class Looks(BoringModel):
        def on_train_start(self) -> None:
            fetcher = private.data_fetcher(self.trainer.fit_loop)
            seen.append([len(list(iter(fetcher))) for _ in range(2)])
            seen.append(private.loaders_of(self.trainer.fit_loop))
            iter(fetcher)

    trainer_for(tmp_path, limit_train_batches=4).fit(Looks(), loader)
    assert seen == [[4, 4], [loader]]


def test_the_barrier_before_a_fit_is_named(tmp_path: Path) -> None:
    names: list[str | None] = []

    class Strategy(SingleDeviceStrategy):
        def barrier(self, name: str | None = None) -> None:
            names.append(name)

    trainer_for(tmp_path, strategy=Strategy()).fit(BoringModel())
    assert names.count(private.BEFORE_FIT) == 1 and names.index(private.BEFORE_FIT) > 0


def test_stateful_loaders_are_given_the_states_of_a_checkpoint(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "middle.ckpt")
            trainer.should_stop = True

    trainer_for(tmp_path, callbacks=[Saves()], limit_train_batches=4).fit(BoringModel(), Counted(RandomDataset(32, 4)))
    given: list[Any] = []

    class Looks(BoringModel):
        def on_fit_start(self) -> None:
            self.trainer.fit_loop.setup_data()  # as the strategy does, before the states are known

        def on_train_start(self) -> None:
            given.append(loader.state)
            loader.state = None
            self.trainer.fit_loop.restarting = True
            self.trainer.fit_loop._combined_loader_states_to_load = [{"passed": 1}]
            private.restore_loaders(self.trainer.fit_loop)
            given.append(loader.state)

    loader = Counted(RandomDataset(32, 4))
    trainer_for(tmp_path, limit_train_batches=4).fit(Looks(), loader, ckpt_path=tmp_path / "middle.ckpt")
    assert given == [None, {"passed": 1}]


def test_a_sampler_that_lightning_deals_out_is_found_inside() -> None:
    inner = torch.utils.data.SubsetRandomSampler(range(4))
    wrapper = DistributedSamplerWrapper(inner, num_replicas=2, rank=0)
    assert private.wrapped_sampler(wrapper) is inner
    own = torch.utils.data.DistributedSampler(RandomDataset(2, 4), num_replicas=2, rank=0)
    assert private.wrapped_sampler(own) is own


# modules


def test_a_module_knows_its_trainer_and_mesh(tmp_path: Path) -> None:
    module, trainer = BoringModel(), trainer_for(tmp_path)
    assert private.trainer_of(module) is None and {private.TRAINER, private.FABRIC} < set(vars(module))
    private.set_trainer(module, trainer)
    assert private.divides_data(trainer) and not private.divides_data(pl.Trainer(use_distributed_sampler=False))
    assert module.trainer is trainer and private.trainer_of(module) is trainer
    assert vars(module)[private.TRAINER] is trainer
    private.set_trainer(module, None)
    assert private.trainer_of(module) is None
    assert module.device_mesh is None
    private.set_device_mesh(module, mesh := object())
    assert module.device_mesh is mesh
    assert "_device_mesh" in inspect.getsource(ModelParallelStrategy.setup_environment)


def test_compiled_modules_are_known_when_a_trainer_has_them() -> None:
    from lightning.pytorch.utilities.compile import from_compiled

    module = BoringModel()
    assert not private.is_compiled_module(module)
    assert private.is_compiled_module(from_compiled(torch.compile(module)))  # type: ignore[arg-type]


# optimizers and precision


def test_hooks_and_clipping_run_between_the_closure_and_the_step(tmp_path: Path) -> None:
    seen: list[str] = []
    trainer = trainer_for(tmp_path, gradient_clip_val=1.0, limit_train_batches=1)
    plugin = trainer.precision_plugin
    own, clip = getattr(plugin, private.AFTER_CLOSURE), plugin.clip_grad_by_norm

    def after_closure(module: Any, optimizer: Any) -> None:
        seen.append("after")
        assert all(p.grad is not None for p in module.parameters())
        own(module, optimizer)

    setattr(plugin, private.AFTER_CLOSURE, after_closure)
    plugin.clip_grad_by_norm = lambda *args: (seen.append("clip"), clip(*args))[1]  # type: ignore[method-assign]

    class Hooked(BoringModel):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append("hook")

    trainer.fit(Hooked())
    assert seen == ["after", "hook", "clip"]
    scaled = MixedPrecision("16-mixed", "cpu")
    assert callable(getattr(scaled, private.AFTER_CLOSURE))


def test_all_hooks_of_a_module_are_called_by_one_function(tmp_path: Path) -> None:
    own, seen = getattr(private.hook_calls(), private.MODULE_HOOK), []

    def noting(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append((trainer, hook_name))
        return own(trainer, hook_name, *args, **kwargs)

    setattr(private.hook_calls(), private.MODULE_HOOK, noting)
    try:
        trainer = trainer_for(tmp_path, limit_train_batches=1)
        trainer.fit(BoringModel())
    finally:
        setattr(private.hook_calls(), private.MODULE_HOOK, own)
    assert {caller for caller, _ in seen} == {trainer}
    wanted = {"on_fit_start", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"}
    wanted |= {"optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_epoch_end", "on_train_end"}
    assert wanted <= {name for _, name in seen}


def test_optimizers_move_their_states_and_tell_whether_they_unscale(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    private.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[weight]["exp_avg"].device.type == "meta"
    assert private.handles_unscaling(optimizer) is False
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    assert private.handles_unscaling(optimizer) is True
    strategy = trainer_for(tmp_path).strategy
    strategy.optimizers, strategy.lr_scheduler_configs = [optimizer], [1]  # type: ignore[list-item]
    private.reset_optimizers(strategy)
    assert strategy.optimizers == [] and strategy.lr_scheduler_configs == []


def test_a_checkpoint_is_collected_under_a_name_that_is_known(tmp_path: Path) -> None:
    trainer, seen = trainer_for(tmp_path), []
    trainer.strategy.connect(BoringModel())
    own = trainer.strategy.lightning_module_state_dict
    trainer.strategy.lightning_module_state_dict = lambda: seen.append(private.collects_checkpoint()) or own()  # type: ignore[method-assign, func-returns-value]
    trainer.save_checkpoint(tmp_path / "any.ckpt", weights_only=True)
    assert seen == [True] and not private.collects_checkpoint()


# callbacks and loggers


def test_averages_are_kept_where_they_are_looked_for(tmp_path: Path) -> None:
    module = BoringModel()
    for callback in (WeightAveraging(), StochasticWeightAveraging(0.1, swa_epoch_start=1)):
        assert private.average_model(callback) is None
        callback.setup(trainer_for(tmp_path, callbacks=[callback]), module, "fit")
        average = private.average_model(callback)
        assert isinstance(average, torch.nn.Module) and average is not module
        assert isinstance(callback, StochasticWeightAveraging) or isinstance(average.module, BoringModel)


def test_a_wandb_logger_that_has_not_begun_can_be_kept_offline(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, log_model=True)
    assert not private.has_experiment(logger)
    assert "anonymous" in logger._wandb_init
    private.without_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    assert private.log_offline(logger) is False and private.log_offline(logger) is True
    try:
        assert logger.experiment.offline and private.has_experiment(logger)
    finally:
        logger.experiment.finish()


# metrics


def test_a_metrics_batch_value_is_what_is_logged_on_a_step() -> None:
    metric = torchmetrics.MeanMetric()
    metric(torch.tensor(2.0))
    assert float(metric(torch.tensor(4.0))) == float(private.batch_value(metric)) == 4.0
    private.set_batch_value(metric, torch.tensor(9.0))
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric

    logged = _ResultMetric(_Metadata(fx="training_step", name="m", on_step=True, on_epoch=True), is_tensor=False)
    logged.update(metric, 1)
    assert float(logged.forward_cache if hasattr(logged, "forward_cache") else logged.value._forward_cache) == 9.0


def test_a_metrics_updates_are_counted_and_what_it_computed_is_kept_until_then() -> None:
    metric = torchmetrics.MeanMetric()
    metric.update(2.0)
    assert float(metric.compute()) == 2.0
    metric.mean_value = torch.tensor(6.0)
    assert float(metric.compute()) == 2.0, "kept"
    private.forget_computed(metric)
    assert float(metric.compute()) == 6.0
    private.set_update_count(metric, 5)
    assert metric.update_count == 5 == vars(metric)[private.UPDATE_COUNT]
    metric.mean_value = torch.tensor(10.0)
    assert float(metric.compute()) == 10.0
    assert private.reductions(metric) == [torchmetrics.utilities.dim_zero_sum] * 2


def test_a_metric_gathers_nothing_while_it_shall_not() -> None:
    gathered: list[Any] = []
    metric = torchmetrics.MeanMetric(
        distributed_available_fn=lambda: True, dist_sync_fn=lambda x, group: (gathered.append(x), [x, x])[1]
    )
    metric.update(2.0)
    with private.not_syncing(metric):
        metric.compute()
    assert not gathered
    private.forget_computed(metric)
    metric.compute()
    assert gathered


def test_a_trainer_is_built_for_one_cpu_whatever_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_AcceleratorConnector", trainer_module._AcceleratorConnector)  # to be restored
    private.build_trainers_for_one_cpu()
    trainer = pl.Trainer(accelerator="gpu", devices=8, num_nodes=4, precision="16-mixed", strategy="fsdp", logger=False)
    assert (
        trainer.world_size == 1 and isinstance(trainer.accelerator, CPUAccelerator) and trainer.precision == "32-true"
    )
