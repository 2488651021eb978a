"""HolmesLauncher: starts processes, and wraps each call of a Trainer (fit, validate, ...) from before the first hook of the strategy.

Lightning resolves ``ckpt_path="last"`` before any hook of the strategy, each rank in its own file system, and takes the
newest file, complete or not. During a call, incomplete checkpoints are skipped, and all ranks use the path that rank 0 finds.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_holmes.checkpoint.finding import whole_checkpoints
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import fabric, pl
from lightning_holmes.lightning_private import (
    FIND_CHECKPOINT,
    FIND_LAST_CHECKPOINTS,
    SubprocessLauncher,
    checkpoint_connector,
    checkpoint_folder,
    set_num_threads,
)
from lightning_holmes.replacements import Replacements


class HolmesLauncher(SubprocessLauncher):
    """Starts the other processes of this host, if no external launcher does, and calls the Trainer's function.

    Args:
        agree: calls its argument on rank 0, and returns its result, or raises its error, on every rank; all ranks must call.
        find_snapshot: begins a fit's snapshots, and returns the path of the snapshot from which a restarted job continues, else the
            checkpoint that the fit was given, or None; all ranks must call.
    """

    def __init__(
        self,
        cluster_environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        agree: Callable[[Callable[[], Any]], Any],
        find_snapshot: Callable[["pl.Trainer", Callable[[Any], Any], Any], Any] | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._agree = agree
        self._find_snapshot = find_snapshot

    @property
    def is_interactive_compatible(self) -> bool:
        """True: this launcher may run in a notebook, where alone Lightning asks.

        Raises:
            ConfigurationError: it would start processes, which cannot run a notebook's cells.
        """
        if self._is_alone or self.cluster_environment.creates_processes_externally:
            return True
        raise ConfigurationError(
            f"devices={self.num_processes}, num_nodes={self.num_nodes} in a notebook: other processes cannot run its cells. Write "
            f"the code into a script and start it with python or torchrun, or set devices=1, num_nodes=1 here"
        )

    @property
    def _is_alone(self) -> bool:
        return self.num_processes * self.num_nodes == 1

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        with Replacements() as changes:
            if trainer is not None:
                self._find_whole(trainer, changes)
            # Lightning's launcher leaves LOCAL_RANK in the environment, which the next Trainer would take as set by an external launcher
            if self._is_alone:
                return function(*args, **kwargs)
            if self.cluster_environment.creates_processes_externally:
                set_num_threads(self.num_processes)
                return function(*args, **kwargs)
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _find_whole(self, trainer: "pl.Trainer", changes: Replacements) -> None:
        connector = checkpoint_connector(trainer)
        find = getattr(connector, FIND_CHECKPOINT)

        @functools.wraps(find)
        def find_everywhere(state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
            def find_checkpoint(path: Any) -> Any:
                if path in ("last", "hpc") or (
                    path is None and fabric.plugins.environments.slurm.SLURMEnvironment.detect()
                ):
                    return self._agree(lambda: find(state_fn, path, *args, **kwargs))
                return find(state_fn, path, *args, **kwargs)

            if state_fn == pl.trainer.states.TrainerFn.FITTING and self._find_snapshot is not None:
                return self._find_snapshot(trainer, find_checkpoint, ckpt_path)
            return find_checkpoint(ckpt_path)

        changes.replace(connector, **{FIND_CHECKPOINT: find_everywhere})
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, pl.callbacks.ModelCheckpoint):
                changes.replace(callback, **{FIND_LAST_CHECKPOINTS: _finding_whole(callback)})


def _finding_whole(callback: pl.callbacks.ModelCheckpoint) -> Callable[["pl.Trainer"], set[str]]:
    find_last = getattr(callback, FIND_LAST_CHECKPOINTS)

    @functools.wraps(find_last)
    def find_whole(trainer: "pl.Trainer") -> set[str]:
        paths: set[str] = find_last(trainer)
        folder = checkpoint_folder(callback, trainer)
        return paths if "://" in folder else whole_checkpoints(paths, Path(folder))

    return find_whole
