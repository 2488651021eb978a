"""Checkpoints as Lightning asks a strategy for them, where each rank holds a part of the module.

A base of HolmesStrategy; what is done with states and files is lightning_holmes.checkpoint's.
"""

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint as checkpoints
from lightning_holmes.checkpoint import finding, resume
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_private import optimizers_to_device, restore_loaders
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.joining import JoiningStrategy
from lightning_holmes.strategy.options import Options


class CheckpointingStrategy(JoiningStrategy):
    """Saves and loads for a strategy that sets ``_pipeline``, ``_plan`` and the like."""

    _pipeline: PipelineModule | None
    _ended: PipelineModule | None
    _plan: Plan | None
    _parameter_groups: ParameterGroups | None
    _shards: ShardedOptimizer | None
    _base_seed: int

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._checkpoints = checkpoints.CheckpointManager(
            distributed=options.save_distributed_checkpoint, background=options.async_checkpoint
        )
        self._saved_weights: tuple[Mapping[str, Any], bool] | None = None
        self._saved_seed: int | None = None

    @property
    def _membership(self) -> checkpoints.Job:
        groups = self._groups
        return checkpoints.Job(
            rank=self.global_rank,
            size=self.world_size,
            replica=0 if groups is None else groups.data_parallel_rank,
            num_replicas=self.data_parallel_size,
            timeout=self._options.timeout or timedelta(days=1),
            tensor_rank=0 if groups is None else groups.tensor_parallel_rank,
            tensor_size=1 if self._plan is None else self._plan.tensor_parallel_size,
        )

    @property
    def _writes_folders(self) -> bool:
        return self._checkpoints.writes_folders(self._membership, self.checkpoint_io)

    # what a checkpoint holds

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state: with folders, what counts on this rank; else all of it on rank 0, and all ranks must call."""
        pipeline = (self._pipeline or self._ended) if self._writes_folders else self._pipeline
        if pipeline is None or self._groups is None:
            if self._writes_folders and not self.is_global_zero:
                return {}
            state = super().lightning_module_state_dict()
            return {k: checkpoints.whole_on_host(v) if dtensor.is_dtensor(v) else v for k, v in state.items()}
        if self._writes_folders:
            return checkpoints.module_part(pipeline)
        root = self._gathering_rank()
        if root is None or self._failed:
            return {}
        with self._explaining():
            return checkpoints.module_state_dict(pipeline, self._groups.p2p, root=root, keeps=self._keeps_gathered)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter names, what counts on this rank; or, for one file, all of it on rank 0,
        numbered as plain Lightning does: then all ranks must call."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        pipeline = self._pipeline or self._ended  # Trainer.save_checkpoint after fit is common
        if pipeline is None or self._groups is None:
            return {}
        assert self._parameter_groups is not None
        names = self._parameter_groups.names_of(optimizer)
        collected = self._collected_states()
        if self._writes_folders:
            return checkpoints.optimizer_part(optimizer, names, pipeline, collected)
        root = self._gathering_rank()
        if root is None or self._failed:
            return {}
        with self._explaining():
            return checkpoints.optimizer_state_dict(
                optimizer,
                names,
                pipeline,
                self._groups.p2p,
                root=root,
                keeps=self._keeps_gathered,
                collected=collected,
            )

    def _collected_states(self) -> dict[str, dict[str, Any]] | None:
        """Optimizer states, each on the replica that writes it, if the optimizer is sharded; all ranks must call."""
        shards = self._shards
        if shards is None:
            return None
        if self._failed and self.world_size > 1:
            return {}  # see save_checkpoint
        assert self._placement is not None
        first = self._placement.coordinate(0)[1]
        with self._explaining():
            return shards.collect(shards.destination if self._writes_folders else lambda name: first)

    def _gathering_rank(self) -> int | None:
        """The pipeline rank of global rank 0, which writes files, for the ranks of its replica; None for others.

        With nodes numbered at random it can stand anywhere.
        """
        assert self._groups is not None and self._placement is not None
        place = self._placement.coordinate(0)
        return place[0] if self._groups.data_parallel_rank == place[1] else None

    @property
    def _keeps_gathered(self) -> bool:
        """Whether this rank's pipeline is that of rank 0; the others of its replica only help to make tensors whole."""
        assert self._groups is not None and self._placement is not None
        return self._groups.tensor_parallel_rank == self._placement.coordinate(0)[2]

    # saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save what Lightning has collected; all ranks must call. With ``async_checkpoint``, returns once it is copied."""
        failed = self._failed and self.world_size > 1
        if failed and (not self._writes_folders or self._shards is not None):
            # a callback saves because of the exception (save_on_exception), but other ranks do not answer any more
            warnings.warn(f"{filepath} is not saved: a rank has failed, and each holds only its part")
            return
        if "loops" in checkpoint:
            self._checkpoints.add_what_resuming_needs(
                self._membership, checkpoint, base_seed=self._base_seed, failed=failed
            )
        plan = self._plan.to_yaml() if self._plan is not None else ""
        background = self._checkpoints.background and self._pipeline is not None and not self._failed
        if not self._writes_folders:
            if not self._is_ours(filepath) or storage_options is not None:
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            else:
                self._checkpoints.save_plain(self._membership, checkpoint, filepath, plan=plan, background=background)
            return
        if storage_options is not None:
            raise ConfigurationError(
                f"storage_options={storage_options!r} is for a CheckpointIO, and a checkpoint folder uses none; set "
                f"save_distributed_checkpoint=False"
            )
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict(keep_vars=True)
        about: dict[str, Any] = {
            "order": list(state),
            "parameters": frozenset(n for n, value in state.items() if isinstance(value, nn.Parameter)),
            "plan": plan,
            "assigned": self._shards is not None,
        }
        if failed:
            try:
                self._checkpoints.save_in_distress(self._membership, checkpoint, filepath, **about)
            except Exception as error:
                warnings.warn(f"{filepath} is not saved: the run has failed, and not on all ranks at once ({error})")
            return
        with self._explaining():
            self._checkpoints.save_folder(self._membership, checkpoint, filepath, background=background, **about)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; all ranks must call."""
        if self._is_ours(filepath):
            self._checkpoints.remove(self._membership, filepath)
        else:
            super().remove_checkpoint(filepath)

    def _is_ours(self, path: Any) -> bool:
        """Whether we write and read a path ourselves: no CheckpointIO of the user's and no URL."""
        return type(self.checkpoint_io) is TorchCheckpointIO and checkpoints.is_local(path)

    # loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's checkpoint, of either format and any layout; all ranks must call."""
        if not self._is_ours(checkpoint_path) and not finding.is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        with self._explaining():
            loaded = self._checkpoints.load(self._membership, checkpoint_path, weights_only=weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._saved_seed = resume.base_seed(loaded)
            resume.give_loaders_their_states(loaded, self._membership.replica, self._membership.num_replicas)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights: at once, or, before the layout is known, when it is, so that a rank reads its part only."""
        saved = checkpoint["state_dict"]
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        averages = any(isinstance(c, WeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if averages and trainer.state.fn == TrainerFn.FITTING:
            saved = checkpoint.get("current_model_state", saved)  # training goes on from these, not from the average
        self._saved_weights = (saved, strict)
        if self._pipeline is not None:
            self._load_saved_weights()

    def _load_saved_weights(self) -> None:
        """Put the weights of the checkpoint that Lightning has opened into the module; all ranks must call."""
        if self._saved_weights is not None:
            assert self._pipeline is not None
            saved, strict = self._saved_weights
            self._saved_weights = None
            checkpoints.load_module_state(self._pipeline, saved, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._pipeline is not None
        saved = checkpoint["optimizer_states"]
        assert self._parameter_groups is not None
        for optimizer, state in zip(self.optimizers, saved, strict=True):
            names = self._parameter_groups.names_of(optimizer)
            with self._explaining():
                checkpoints.load_optimizer_state(optimizer, state, names, self._pipeline.local_parameters, self._shards)
            optimizers_to_device([optimizer], self.root_device)
        assert self.lightning_module is not None
        # Lightning does it when it makes the loaders, but here, and wherever ``estimated_stepping_batches`` is asked for,
        # they were made, and their first pass begun, before it knew the states
        restore_loaders(self.lightning_module.trainer.fit_loop)
