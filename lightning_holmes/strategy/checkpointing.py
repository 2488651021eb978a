"""RunCheckpoints: the strategy's checkpoint hooks: collect the states of a run, save them, and load them again.

    checkpoints = RunCheckpoints(manager=manager, job=job, run=run, fit=fit, loaded_state=loaded_state, module=..., io=...)
    checkpoints.save({"state_dict": checkpoints.module_state(), ...}, "last.ckpt")

States and files are handled by lightning_holmes.checkpoint.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint as checkpoints
from lightning_holmes.checkpoint import finding, run_state
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.lightning_package import fabric, pl
from lightning_holmes.lightning_private import average_model, collects_checkpoint, restore_loaders
from lightning_holmes.optim.remote import RemoteHost
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.strategy.building import WAITS
from lightning_holmes.strategy.fit import Fit
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.run import Run
from lightning_holmes.strategy.user_hooks import looks_at_checkpoints, warn_of_parts

_STATES = ("state_dict", "optimizer_states", "loops", "lr_schedulers")
_HALF_DONE = (
    "optimizer nodes have updated some layers with this batch's gradients, and the others wait for the optimizer's step; save in "
    "on_train_batch_end, or override on_before_optimizer_step, after which nodes wait for the step, too"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """The strategy's checkpoint hooks at one moment. All ranks must call its methods, unless their docstrings say otherwise.

    Attributes:
        run: the present run or the last one, if any.
        fit: the last run that trained, if any: Trainer.save_checkpoint after fit is common.
        loaded_state: keeps loaded states until the layout is known.
        io: the strategy's CheckpointIO; if it is not Lightning's own, it is given single files, as it expects.
    """

    manager: checkpoints.CheckpointManager
    job: Job
    run: Run | None
    fit: Fit | None
    loaded_state: LoadedState
    module: pl.LightningModule
    io: fabric.plugins.CheckpointIO

    @property
    def _writes_folders(self) -> bool:
        return self.manager.writes_folders(self.job.membership, self.io)

    @property
    def _open_run(self) -> Run | None:
        return self.run if self.run is not None and self.run.is_open else None

    @property
    def _has_failed_beside_others(self) -> bool:
        """Whether a run with several ranks has failed, so that other ranks do not answer any more; a callback may still save
        (save_on_exception)."""
        return self.job.connection.failed and self.job.connection.world_size > 1

    @property
    def _is_interrupted(self) -> bool:
        """Whether the trainer was interrupted: a callback saves because of an exception."""
        return self.module.trainer.state.status == pl.trainer.states.TrainerStatus.INTERRUPTED

    @property
    def _is_half_done(self) -> bool:
        """Whether optimizer nodes have stepped some layers and not others; stays True if the run has failed in that state."""
        shards = None if self.fit is None else self.fit.shards
        return isinstance(shards, RemoteHost) and shards.is_half_done

    # what a checkpoint holds

    def module_state(self) -> dict[str, Any]:
        """Return the module's state: for a checkpoint folder, the part that this rank writes; for one file, all of it on rank 0."""
        self.manager.collected = ()
        if self._is_half_done:
            if self._is_interrupted:
                return {}
            raise UnsupportedModuleError(f"{type(self.module).__name__} cannot be saved now: {_HALF_DONE}")
        run = self._run_of_state
        if run is not None and run.context.builder.waits:
            if self._is_interrupted:
                return {}
            raise UnsupportedModuleError(f"{type(self.module).__name__} cannot be saved yet: {WAITS}")
        if run is None:
            if self._writes_folders and self.job.connection.rank != 0:
                return {}
            state = self.module.state_dict()
            return {k: checkpoints.whole_on_host(v) if dtensor.is_dtensor(v) else v for k, v in state.items()}
        shards = self._stage_shards
        if shards is not None and self._are_collected_when_written:
            self.manager.collected = self._parameters_in_turn(run, shards)
            return checkpoints.module_part(run.pipeline, {})
        collected = None if shards is None else self._collected(shards, shards.collect)
        if shards is not None:
            self._close_queue(shards)
        part = checkpoints.module_part(run.pipeline, collected)
        if self._writes_folders:
            return part
        whole = self._gathered(part)
        return {key: whole[key] for key in run.pipeline.module.state_dict(keep_vars=True) if key in whole}

    @property
    def _run_of_state(self) -> Run | None:
        """The run whose stages say which rank has which part of the module; None if rank 0 has all of it."""
        if self.run is not None and self.run.stage_shards is not None:
            return self.run
        return self._open_run or (self.fit if self._writes_folders else None)

    @property
    def _stage_shards(self) -> StageShards | None:
        """The shards of the parameters; None if they are whole."""
        runs = [run for run in (self.run, self.fit) if run is not None and run.stage_shards is not None]
        return runs[0].stage_shards if runs else None

    def _parameters_in_turn(self, run: Run, shards: StageShards) -> Iterator[checkpoints.Item]:
        """Yield the parameters that this rank writes, one part of the module at a time. All replicas go through them."""
        names: dict[str, list[checkpoints.Value]] = {}
        for key, name, _ in checkpoints.owned_entries(run.pipeline):
            names.setdefault(name, []).append(("state_dict", key))
        for name, value in shards.each_whole(shards.destination):
            if name in names:
                yield names[name], value
        self._close_queue(shards)

    def _collected(
        self, shards: StageShards | OwnedStates, collect: Callable[[Callable[[str], int]], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return what ``shards`` hold by parameter name, whole, each on the replica that writes it. All replicas call."""
        if self._has_failed_beside_others:
            return {}
        first = self.job.place_of_rank_0[1]
        with self.job.explaining():
            return collect(shards.destination if self._writes_folders else lambda name: first)

    def _close_queue(self, shards: StageShards) -> None:
        """Close the queue that collecting parameters uses, which nothing else closes after a run."""
        if self._open_run is None:
            shards.queue.close()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state: for a checkpoint folder, the part that this rank writes, by parameter names; for one file, all of it on
        rank 0, numbered as plain Lightning does."""
        fit = self.fit
        if fit is None or self._is_half_done:  # module_state has raised for that
            return {}
        optimizer = optimizer.optimizer if isinstance(optimizer, pl.core.optimizer.LightningOptimizer) else optimizer
        hide = self.loaded_state.show_optimizers(fit.load_optimizer, fit.parameter_groups.names_of)
        try:
            return self._optimizer_state(optimizer, fit)
        finally:
            hide()

    def _optimizer_state(self, optimizer: Optimizer, fit: Fit) -> dict[str, Any]:
        names = fit.parameter_groups.names_of(optimizer)
        if fit.shards is not None and self._are_collected_when_written:
            index = fit.trainer.optimizers.index(optimizer)
            states = self._states_in_turn(fit, fit.shards.each_state(fit.shards.destination), f"optimizer_{index}")
            self.manager.collected = itertools.chain(self.manager.collected, states)
            return checkpoints.optimizer_part(optimizer, names, fit.pipeline, {})
        owned = fit.shards
        collected = None if owned is None else self._collected(owned, lambda target: dict(owned.each_state(target)))
        part = checkpoints.optimizer_part(optimizer, names, fit.pipeline, collected)
        return (
            part if self._writes_folders else checkpoints.numbered(self._gathered(part["state"]), part["param_groups"])
        )

    def _gathered(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return for one file, on rank 0, the union of the parts of the ranks of its replica; {} on other ranks."""
        pipeline_rank, replica, tensor_rank = self.job.place_of_rank_0
        groups = self.job.groups
        if groups.data_parallel_rank != replica or self._has_failed_beside_others:
            return {}
        with self.job.explaining():
            return checkpoints.gather_parts(
                groups.p2p, part, root=pipeline_rank, keeps=groups.tensor_parallel_rank == tensor_rank
            )

    def _states_in_turn(
        self, fit: Fit, states: Iterator[tuple[str, Mapping[str, Any]]], optimizer: str
    ) -> Iterator[checkpoints.Item]:
        """Yield the states that this rank writes, one part of the module at a time. All replicas go through them."""
        for name, state in states:
            if fit.pipeline.is_owner(name):
                for key, value in state.items():
                    yield [(optimizer, "state", name, key)], value

    @property
    def _are_collected_when_written(self) -> bool:
        """Whether the sharded values of a folder are collected as they are written: no code reads a checkpoint's values before."""
        if not self._writes_folders or self._has_failed_beside_others or self.job.placement.tensor_parallel_size > 1:
            return False
        return collects_checkpoint() and not looks_at_checkpoints(self.module)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a replica's training batch; 0 if it is not known yet."""
        if self.fit is None or self.fit.planned is None:
            return self.loaded_state.num_microbatches or 0
        return self.fit.plan.num_microbatches

    # saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save the checkpoint that Lightning has collected. With ``async_checkpoint``, return once it is copied.

        If the run has failed and this rank cannot save, warn instead.
        """
        member, is_sharded = self.job.membership, self.fit is not None and self.fit.shards is not None
        if self._has_failed_beside_others:
            told = self.job.connection.told or "a rank has failed, and each rank holds only its part of the module"
            warnings.warn(f"{path} is not saved: {told}")
            return
        if self._is_half_done:
            warnings.warn(f"{path} is not saved: {_HALF_DONE}")
            return
        run = self.fit or self.run
        if run is not None and run.is_open and run.context.builder.waits:
            warnings.warn(f"{path} is not saved: the run has ended before its first batch, and {WAITS}")
            return
        if "loops" in checkpoint:
            run_state.add(
                member,
                checkpoint,
                base_seed=0 if run is None else run.base_seed,
                num_microbatches=self.num_microbatches,
            )
        if run is not None and member.rank == 0:  # hyperparameters may be modules that are parts of this one
            pipeline, state = run.pipeline, checkpoint.get("state_dict", {})
            checkpoint |= {k: pipeline.standalone(v, state) for k, v in checkpoint.items() if k not in _STATES}
        plan = "" if self.run is None or self.run.planned is None else self.run.plan.to_yaml()
        background = self.manager.background and self._open_run is not None and not self.job.connection.failed
        if not self._writes_folders:
            run_state.add_plan(checkpoint, plan)
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
        of_state = self._run_of_state
        if of_state is not None and "state_dict" in checkpoint:  # a hook may have put the whole module's state there
            checkpoint["state_dict"] = checkpoints.owned(checkpoint["state_dict"], of_state.pipeline)
        if self._open_run is None and self._stage_shards is None and "current_model_state" in checkpoint:
            # of averaged weights, which have moved this rank's part there
            checkpoint["current_model_state"] = self.module.state_dict()
        about = _names(self.module) | {"plan": plan, "assigned": frozenset(assigned)}
        with self.job.explaining():
            self.manager.save_folder(member, checkpoint, path, background=background, **about)

    def remove(self, path: Any) -> None:
        """Remove a checkpoint."""
        if self.is_ours(path):
            self.manager.remove(self.job.membership, path)
        elif self.job.connection.rank == 0:
            self.io.remove_checkpoint(path)

    def is_ours(self, path: Any) -> bool:
        """Whether this package reads and writes the path itself: it is no URL, and there is no CheckpointIO of the user's."""
        return type(self.io) is fabric.plugins.TorchCheckpointIO and checkpoints.is_local(path)

    # loading

    def load(self, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Load a checkpoint of either format and any layout."""
        if not self.is_ours(path) and not finding.is_folder(path):
            torch.cuda.empty_cache()
            return self.io.load_checkpoint(path, weights_only=weights_only)
        return self.load_folder(path, weights_only=weights_only)

    def load_folder(self, path: Any, *, weights_only: bool | None) -> dict[str, Any]:
        """Load a checkpoint that this package has written, in either format and any layout; this host may lack its files."""
        member = self.job.membership
        with self.job.explaining():
            loaded = self.manager.load(member, path, weights_only=weights_only)
        if self.module.trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
            self.loaded_state.seed = run_state.base_seed(loaded)
            self.loaded_state.num_microbatches = run_state.num_microbatches(loaded, member.num_replicas)
            run_state.give_loaders_their_states(loaded, member.replica, member.num_replicas)
        return loaded

    def load_module(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load weights: now if the layout is known, else as soon as it is, so that a rank reads only its part."""
        saved, trainer = checkpoint["state_dict"], self.module.trainer
        fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        averages = [c for c in trainer.callbacks if isinstance(c, pl.callbacks.WeightAveraging)]  # type: ignore[attr-defined]
        if any(fitting or average_model(callback) is not None for callback in averages):
            # training continues from these, not from the average; and so does an evaluation after a fit with the same callback
            saved = checkpoint.get("current_model_state", saved)
        self.loaded_state.weights = (saved, strict)
        if self._open_run is None:
            return
        put = functools.partial(self.loaded_state.put_weights, self._open_run.pipeline)
        if self._stage_shards is None:
            put()
        else:
            self._stage_shards.put(put)

    def load_optimizers(self, saved: Mapping[str, Any], fit: Fit) -> None:
        """Load the states of the optimizers of ``fit``, now or as soon as its layout is known, and the states of stateful loaders."""
        optimizers = fit.trainer.strategy.optimizers
        self.loaded_state.hold_optimizers(optimizers, saved["optimizer_states"])
        if fit.planned is not None:
            self.loaded_state.put_optimizers(fit.load_optimizer, fit.parameter_groups.names_of)
        # Lightning restores loaders when it makes them; but if ``estimated_stepping_batches`` was read, they were made, and their first
        # pass begun, before Lightning knew the states
        restore_loaders(fit.trainer.fit_loop)


def save_folder_alone(checkpoint: dict[str, Any], path: Any, module: pl.LightningModule) -> None:
    """Save a module that has not been run yet, and that this process has whole, as a checkpoint folder."""
    manager = checkpoints.CheckpointManager(distributed=True, background=False)
    manager.save_folder(
        checkpoints.Membership(), checkpoint, path, **_names(module), plan="", assigned=frozenset(), background=False
    )


def _names(module: pl.LightningModule) -> dict[str, Any]:
    """Return the names in a module's state for a folder's manifest: all in order, and which of them are parameters."""
    state = module.state_dict(keep_vars=True)
    return {"order": list(state), "parameters": frozenset(n for n, v in state.items() if isinstance(v, nn.Parameter))}
