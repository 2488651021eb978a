"""ModuleShards: keeps a module that was built without memory in shards, from when it has values, and between runs.

The module is never whole: one part at a time is built, or read from a checkpoint, sharded, and released. A strategy has one ModuleShards.

    module_shards.fill(shards, builder, loaded_state, pipeline, connection.all_gather)
    ...
    module_shards.of(module)          # the shards of the last run, for checkpoints after it and for the next run
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_holmes import checkpoint
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.loaded_state import LoadedState


class ModuleShards:
    """The shards of the last module that stays in shards; none at the start."""

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

    def fill(
        self,
        shards: StageShards,
        builder: ModuleBuilder,
        loaded_state: LoadedState,
        pipeline: PipelineModule,
        all_gather: Callable[[Any], list[Any]],
    ) -> None:
        """Fill ``shards`` of the ``pipeline``'s parameters with their first values: a checkpoint's, or the module's initial ones. All ranks must
        call.

        Raises:
            UnsupportedModuleError: a parameter gets no value from anywhere.
            ConfigurationError: in an earlier run this rank held only a part of the parameters that it needs now.
        """
        saved = loaded_state.take("weights")
        bring_part = builder.bring_parts(pipeline, overwritten=saved is not None)
        at_once = saved is not None and checkpoint.renames(
            pipeline.module
        )  # if names are changed, it is not known which saved entries belong to a part
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
        self.keep(shards, pipeline.module)
        if saved is not None and at_once:
            shards.put(lambda: checkpoint.load_module_state(pipeline, saved[0], strict=saved[1]))
        elif saved is not None:
            # load the buffers, and call as often as the other ranks: ranks may read from each other's disks
            for _ in range(max(all_gather(count)) - count + 1):
                checkpoint.load_module_state(pipeline, saved[0], strict=saved[1], only=())
