"""RunCheckpoints: what a checkpoint holds of a strategy's runs, and where it goes, as Lightning asks for it piece by piece.

    checkpoints = RunCheckpoints(manager=manager, job=job, run=run, fit=fit, resumption=resumption, module=..., io=...)
    checkpoints.save({"state_dict": checkpoints.module_state(), ...}, "last.ckpt")

What is done with states and files is lightning_holmes.checkpoint's.
"""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint as checkpoints
from lightning_holmes.checkpoint import finding, resume
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import CheckpointDamagedError, ConfigurationError, UnsupportedModuleError
from lightning_holmes.lightning_private import collects_checkpoint, restore_loaders
from lightning_holmes.optim.joined_steps import JoinedSteps
from lightning_holmes.optim.node_writer import NodeWriter
from lightning_holmes.optim.remote import RemoteOptimizer
from lightning_holmes.optim.remote_parameters import RemoteParameters
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.strategy.building import WAITS, ModuleBuilder
from lightning_holmes.strategy.fit import Fit
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.resuming import Resumption
from lightning_holmes.strategy.run import Run
from lightning_holmes.strategy.user_hooks import looks_at_checkpoints, warn_of_parts

_STATES = ("state_dict", "optimizer_states", "loops", "lr_schedulers")
_HALF_DONE = (
    "optimizer nodes have updated some layers with this batch's gradients, and the others wait for the optimizer's step; save in "
    "on_train_batch_end, or override on_before_optimizer_step, after which nodes wait for the step, too"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """The strategy's checkpoint hooks at one moment. All ranks must call its methods, but where they say so.

    Attributes:
        run: the present run or the last one, if any.
        fit: the last one that trained, if any: Trainer.save_checkpoint after fit is common.
        resumption: where what is loaded waits until a layout is known.
        io: Lightning's; one of the user's own gets files as it expects.
        leaves_to_nodes: what is saved goes without what optimizer nodes hold.
        builder: of the module, if it has been configured.
    """

    manager: checkpoints.CheckpointManager
    job: Job
    run: Run | None
    fit: Fit | None
    resumption: Resumption
    module: pl.LightningModule
    io: CheckpointIO
    leaves_to_nodes: bool = False
    builder: ModuleBuilder | None = None

    @property
    def version_on_nodes(self) -> int | None:
        """Of the values that optimizer nodes hold and will keep when workers are lost."""
        shards = self._stage_shards
        return shards.version if isinstance(shards, RemoteParameters) and shards.is_kept else None

    @property
    def _writes_folders(self) -> bool:
        return self.manager.writes_folders(self.job.membership, self.io)

    @property
    def _open_run(self) -> Run | None:
        return self.run if self.run is not None and self.run.is_open else None

    @property
    def _has_failed_beside_others(self) -> bool:
        """A callback saves because of an exception (save_on_exception), but other ranks do not answer any more."""
        return self.job.connection.failed and self.job.connection.world_size > 1

    @property
    def _is_interrupted(self) -> bool:
        """A callback saves because of an exception."""
        return self.module.trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _is_half_done(self) -> bool:
        """Optimizer nodes hold some layers after a step, and others before it; true of a run that has failed then, for good."""
        shards = None if self.fit is None else self.fit.shards
        return isinstance(shards, RemoteOptimizer) and shards.is_half_done

    # what a checkpoint holds

    def module_state(self) -> dict[str, Any]:
        """The module's state: with folders, what counts on this rank; else all of it on rank 0."""
        self.manager.reading = None
        if self._is_half_done:
            if self._is_interrupted:
                return {}
            raise UnsupportedModuleError(f"{type(self.module).__name__} cannot be saved now: {_HALF_DONE}")
        run = self._open_run or (self.fit if self._writes_folders else None)
        if self.run is not None and self.run.stage_shards is not None:
            run = self.run
        if run is not None and run.context.builder.waits:
            if self._is_interrupted:
                return {}
            raise UnsupportedModuleError(f"{type(self.module).__name__} cannot be saved yet: {WAITS}")
        if run is None:
            if self._writes_folders and self.job.connection.rank != 0:
                return {}
            state = self.module.state_dict()
            return {k: checkpoints.whole_on_host(v) if dtensor.is_dtensor(v) else v for k, v in state.items()}
        collected = self._collected_parameters()
        if self._writes_folders:
            return checkpoints.module_part(run.pipeline, collected)
        root = self._gathering_rank()
        if root is None or self._has_failed_beside_others:
            return {}
        with self.job.explaining():
            return checkpoints.module_state_dict(
                run.pipeline, self.job.groups.p2p, root=root, keeps=self._keeps_gathered, collected=collected
            )

    @property
    def _stage_shards(self) -> StageShards | None:
        """Where parameters live, if that is in shards."""
        runs = [run for run in (self.run, self.fit) if run is not None and run.stage_shards is not None]
        return runs[0].stage_shards if runs else None

    def _collected_parameters(self) -> Mapping[str, Any] | None:
        """Whole parameters, each on the replica that writes it, where they live in shards; for a folder they are brought when they
        are written."""
        shards = self._stage_shards
        if shards is None:
            return None
        if self._has_failed_beside_others or self.leaves_to_nodes:
            return {}
        if isinstance(shards, RemoteParameters) and self._may_stay_on_nodes:
            here, values = shards.collect_in_steps(shards.destination)
            return {n: _deferred(values, n, "", shards.num_bytes(n), shards.writer_of(n)) for n in here}
        first = self.job.place_of_rank_0[1]
        # they stay in shards after a run, and nobody else ends what this has begun
        close = shards.queue.close if self._open_run is None else lambda: None
        if not (self._writes_folders and self._reads_when_written and type(shards) is StageShards):
            with self.job.explaining():
                found = shards.collect(shards.destination if self._writes_folders else lambda name: first)
            close()
            return found
        names, parameters = shards.collect_in_steps(shards.destination, end=close)
        self.manager.reading = parameters
        return {name: _deferred(parameters, name, "") for name in names}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter names, what counts on this rank; or, for one file, all of it on rank 0,
        numbered as plain Lightning does."""
        fit = self.fit
        if fit is None or self._is_half_done:  # of which the module's state has told
            return {}
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        hide = self.resumption.show_optimizers(fit.load_optimizer, fit.parameter_groups.names_of)
        try:
            return self._optimizer_state(optimizer, fit)
        finally:
            hide()

    def _optimizer_state(self, optimizer: Optimizer, fit: Fit) -> dict[str, Any]:
        names = fit.parameter_groups.names_of(optimizer)
        collected = self._collected_states(fit)
        if self._writes_folders:
            return checkpoints.optimizer_part(optimizer, names, fit.pipeline, collected)
        root = self._gathering_rank()
        if root is None or self._has_failed_beside_others:
            return {}
        with self.job.explaining():
            return checkpoints.optimizer_state_dict(
                optimizer,
                names,
                fit.pipeline,
                self.job.groups.p2p,
                root=root,
                keeps=self._keeps_gathered,
                collected=collected,
            )

    def _collected_states(self, fit: Fit) -> dict[str, dict[str, Any]] | None:
        """Optimizer states, each on the replica that writes it, if the optimizer is sharded."""
        shards = fit.shards
        if shards is None:
            return None
        if self._has_failed_beside_others or self.leaves_to_nodes:
            return {}
        first = self.job.place_of_rank_0[1]
        with self.job.explaining():
            if not self._writes_folders:
                return shards.collect(lambda name: first)
            if isinstance(shards, RemoteOptimizer) and self._may_stay_on_nodes:
                keys, states = shards.collect_in_steps()
                return {
                    name: {
                        key: _deferred(states, name, key, shards.num_bytes(name, key), shards.writer_of(name))
                        for key in of_name
                    }
                    for name, of_name in keys.items()
                }
            if not self._reads_when_written:
                return shards.collect(shards.destination)
            keys, states = shards.collect_in_steps()
        states.follow(self.manager.reading)
        self.manager.reading = states
        return {name: {key: _deferred(states, name, key) for key in of_name} for name, of_name in keys.items()}

    @property
    def _reads_when_written(self) -> bool:
        """Whether a folder's values may be brought when they are written."""
        return not self.manager.background and self._are_for_the_folder_only

    @property
    def _may_stay_on_nodes(self) -> bool:
        """Whether optimizer nodes may write a folder's values themselves."""
        return self._writes_folders and not self.job.connection.failed and self._are_for_the_folder_only

    @property
    def _are_for_the_folder_only(self) -> bool:
        """Nobody looks at a checkpoint's values before they are written."""
        if self.job.placement.tensor_parallel_size > 1 or not collects_checkpoint():
            return False
        return not looks_at_checkpoints(self.module)

    def _gathering_rank(self) -> int | None:
        """The pipeline rank of global rank 0, which writes files, for the ranks of its replica; None for others."""
        pipeline_rank, replica, _ = self.job.place_of_rank_0
        return pipeline_rank if self.job.groups.data_parallel_rank == replica else None

    @property
    def _keeps_gathered(self) -> bool:
        """Whether this rank's pipeline is that of rank 0; the others of its replica only help to make tensors whole."""
        return self.job.groups.tensor_parallel_rank == self.job.place_of_rank_0[2]

    @property
    def num_microbatches(self) -> int:
        """Of a replica's training batch; 0 where nothing is known."""
        if self.fit is None or self.fit.planned is None:
            return self.resumption.num_microbatches or 0
        return self.fit.plan.num_microbatches

    # saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save what Lightning has collected. With ``async_checkpoint``, returns once it is copied."""
        failed, member = self._has_failed_beside_others, self.job.membership
        is_sharded = self.fit is not None and self.fit.shards is not None
        if failed and (not self._writes_folders or is_sharded):
            warnings.warn(f"{path} is not saved: a rank has failed, and each rank holds only its part of the module")
            return
        if failed and self.job.connection.told:  # that rank does not come, and may take the job's store with it
            warnings.warn(f"{path} is not saved: {self.job.connection.told}")
            return
        if self._is_half_done:
            warnings.warn(f"{path} is not saved: {_HALF_DONE}")
            return
        run = self.fit or self.run
        if run is not None and run.is_open and run.context.builder.waits:
            warnings.warn(f"{path} is not saved: the run has ended before its first batch, and {WAITS}")
            return
        if "loops" in checkpoint:
            self.manager.add_what_resuming_needs(
                member,
                checkpoint,
                base_seed=0 if run is None else run.base_seed,
                num_microbatches=self.num_microbatches,
                failed=failed,
            )
        if run is not None and member.rank == 0:  # hyperparameters may be modules, which are parts of this one
            pipeline, state = run.pipeline, checkpoint.get("state_dict", {})
            checkpoint |= {k: pipeline.standalone(v, state) for k, v in checkpoint.items() if k not in _STATES}
        plan = "" if self.run is None or self.run.planned is None else self.run.plan.to_yaml()
        background = self.manager.background and self._open_run is not None and not self.job.connection.failed
        if not self._writes_folders:
            resume.add_plan(checkpoint, plan)
            if self.is_ours(path) and storage_options is None:
                self.manager.save_plain(member, checkpoint, path, background=background)
            elif member.rank == 0:
                self.io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if storage_options is not None:
            raise ConfigurationError(
                f"storage_options={storage_options!r} is for a CheckpointIO, and a checkpoint folder uses none; set "
                f"save_distributed_checkpoint=False"
            )
        if self.job.placement.pipeline_parallel_size > 1:
            warn_of_parts(self.module)
        assigned = ["optimizer"] * is_sharded + ["state_dict"] * (self._stage_shards is not None)
        if run is not None and "state_dict" in checkpoint:  # a hook may have put the whole module's there
            checkpoint["state_dict"] = checkpoints.owned(checkpoint["state_dict"], run.pipeline)
        about = _names(self.module) | {"plan": plan, "assigned": frozenset(assigned)}
        if failed:
            try:
                self.manager.save_in_distress(member, checkpoint, path, **about)
            except Exception as error:
                warnings.warn(f"{path} is not saved: the run has failed, and not on all ranks at once ({error})")
            return
        self.manager.others_may_write = isinstance(None if self.fit is None else self.fit.shards, RemoteOptimizer)
        with self.job.explaining():
            self.manager.save_folder(member, checkpoint, path, background=background, **about)

    def remove(self, path: Any) -> None:
        """Remove a checkpoint."""
        if self.is_ours(path):
            self.manager.remove(self.job.membership, path)
        elif self.job.connection.rank == 0:
            self.io.remove_checkpoint(path)

    def is_ours(self, path: Any) -> bool:
        """Whether we write and read a path ourselves: no CheckpointIO of the user's and no URL."""
        return type(self.io) is TorchCheckpointIO and checkpoints.is_local(path)

    # loading

    def load(self, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Lightning's checkpoint, of either format and any layout."""
        if not self.is_ours(path) and not finding.is_folder(path):
            torch.cuda.empty_cache()
            return self.io.load_checkpoint(path, weights_only=weights_only)
        return self.load_folder(path, weights_only=weights_only)

    def load_folder(self, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Likewise of what we have written, which this host may not have."""
        member = self.job.membership
        with self.job.explaining():
            loaded = self.manager.load(member, path, weights_only=weights_only)
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.resumption.seed = resume.base_seed(loaded)
            self.resumption.num_microbatches = resume.num_microbatches(loaded, member.num_replicas)
            resume.give_loaders_their_states(loaded, member.replica, member.num_replicas)
        return loaded

    def add_kept(self, loaded: dict[str, Any]) -> None:
        """To a snapshot without parameters add those that optimizer nodes have kept; each rank asks for all. Not where the module is built part by part
        when the first batch comes: then the nodes are the only ones that have them.

        Raises:
            CheckpointDamagedError: one is missing.
        """
        if self.builder is not None and self.builder.waits:
            return
        values = self.job.optimizer_nodes(self.job.connection.options.optimizer_nodes).kept_values()
        missing = [name for name, _ in self.module.named_parameters() if name not in values]
        if missing:
            raise CheckpointDamagedError(
                f"the optimizer nodes have kept no value of {missing[0]} of {type(self.module).__name__}, from which this job was to go on: was "
                f"the module changed, or a node started anew? The next start takes what was saved before"
            )
        loaded["state_dict"].update(values)

    def load_module(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load weights: at once, or, before the layout is known, when it is, so that a rank reads its part only."""
        saved, trainer = checkpoint["state_dict"], self.module.trainer
        averages = any(isinstance(c, WeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if averages and trainer.state.fn == TrainerFn.FITTING:
            saved = checkpoint.get("current_model_state", saved)  # training goes on from these, not from the average
        self.resumption.weights = (saved, strict)
        if self._open_run is None:
            return
        put = functools.partial(self.resumption.put_weights, self._open_run.pipeline)
        if self._stage_shards is None:
            put()
        else:
            self._stage_shards.put(put)

    def load_optimizers(self, saved: Mapping[str, Any], fit: Fit) -> None:
        """Load the states of the optimizers of ``fit``, now or when its layout is known, and those of stateful loaders."""
        optimizers = fit.trainer.strategy.optimizers
        self.resumption.hold_optimizers(optimizers, saved["optimizer_states"])
        if fit.planned is not None:
            self.resumption.put_optimizers(fit.load_optimizer, fit.parameter_groups.names_of)
        # Lightning does it when it makes the loaders, but wherever ``estimated_stepping_batches`` is asked for they were made,
        # and their first pass begun, before it knew the states
        restore_loaders(fit.trainer.fit_loop)


def save_folder_alone(checkpoint: dict[str, Any], path: Any, module: pl.LightningModule) -> None:
    """Save a module of which nothing has been run yet, and which this process has whole, as a folder."""
    manager = checkpoints.CheckpointManager(distributed=True, background=False)
    manager.save_folder(
        checkpoints.Job(), checkpoint, path, **_names(module), plan="", assigned=frozenset(), background=False
    )


def _deferred(
    values: JoinedSteps, name: str, key: str, num_bytes: int = 0, writer: NodeWriter | None = None
) -> checkpoints.Deferred:
    read = functools.partial(values.take, name, key)
    return checkpoints.Deferred(place=(name, key), read=read, num_bytes=num_bytes, writer=writer)


def _names(module: pl.LightningModule) -> dict[str, Any]:
    """What a folder says of a module's state: the names in order, and which are parameters."""
    state = module.state_dict(keep_vars=True)
    return {"order": list(state), "parameters": frozenset(n for n, v in state.items() if isinstance(v, nn.Parameter))}
