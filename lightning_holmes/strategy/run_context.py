"""RunContext: what a run is made from, in addition to its trainer; ModuleShards: keeps a module that was built without
memory in shards; and the context managers in which steps run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_holmes import checkpoint
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.lightning_package import pl
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.plan import Plan
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.snapshots import Snapshots


class ModuleShards:
    """The shards of the last module that stays in shards, for checkpoints after its run and for the next run; none at
    the start. A strategy has one."""

    def __init__(self) -> None:
        self._shards: StageShards | None = None
        self._module: nn.Module | None = None

    def of(self, module: nn.Module) -> StageShards | None:
        """Return the shards in which ``module`` lives, or None."""
        return self._shards if self._module is module else None

    def keep(self, shards: StageShards, module: nn.Module) -> None:
        """Keep ``shards`` as those of ``module`` from now on, also between runs."""
        shards.stays = True
        self._shards, self._module = shards, module

    def take(self, module: nn.Module) -> StageShards | None:
        """Return the shards of ``module``, or None, and do not keep them any more."""
        found, self._shards, self._module = self.of(module), None, None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run is made from, in addition to its trainer.

    Attributes:
        builder: builds the module, which may have no memory yet.
        loaded_state: the states that were loaded from a checkpoint.
        splitter: splits batches; it learns from the batches of all runs.
        former: the plan of the previous run, whose layout is kept if it fits.
        module_shards: the shards of a module that stays sharded between runs.
        snapshots: the snapshots of a fit; None if it takes none.
        undo: undoes the run's changes, last change first, even if its set-up fails half-way.
    """

    job: Job
    options: Options
    builder: ModuleBuilder
    loaded_state: LoadedState
    splitter: BatchSplitter
    former: Plan | None
    module_shards: ModuleShards
    undo: Replacements
    snapshots: Snapshots | None = None

    def fill_shards(self, shards: StageShards, pipeline: PipelineModule) -> None:
        """Fill ``shards`` of the ``pipeline``'s parameters with their first values, a checkpoint's or the module's initial
        ones, and keep them in :attr:`module_shards`. The module is never whole: one part at a time is built, or read from
        a checkpoint, sharded, and released. All ranks must call.

        Raises:
            UnsupportedModuleError: a parameter gets no value from anywhere.
            ConfigurationError: in an earlier run this rank held only a part of the parameters that it needs now.
        """
        saved = self.loaded_state.take("weights")
        bring_part = self.builder.bring_parts(pipeline, overwritten=saved is not None)
        # if names are changed, it is not known which saved entries belong to a part
        at_once = saved is not None and checkpoint.renames(pipeline.module)
        count = 0

        def bring(names: Sequence[str]) -> None:
            nonlocal count
            give_back_freed_memory()  # of the previous part, which is large
            bring_part(names)
            if saved is not None and not at_once:
                count += 1
                checkpoint.load_module_state(pipeline, saved[0], strict=saved[1], only=names)

        shards.lay_out(by_elements=True, bring=bring)
        give_back_freed_memory()
        self.module_shards.keep(shards, pipeline.module)
        if saved is not None and at_once:
            shards.put(lambda: checkpoint.load_module_state(pipeline, saved[0], strict=saved[1]))
        elif saved is not None:
            # load the buffers, and call as often as the other ranks: ranks may read from each other's disks
            for _ in range(max(self.job.connection.all_gather(count)) - count + 1):
                checkpoint.load_module_state(pipeline, saved[0], strict=saved[1], only=())


def step_context(trainer: "pl.Trainer", step_name: str) -> Any:
    """Return the context manager of the precision plugin under which a step runs."""
    plugin = trainer.precision_plugin
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[step_name]()
