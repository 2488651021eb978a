"""RestingShards: a module that is built without memory, in shards from the moment that it has values, and between runs.

It is never whole: a part at a time is built, or read from a checkpoint, cut, and let go of. One object serves a strategy.

    resting.fill(shards, builder, resumption, pipeline, connection.all_gather)
    ...
    resting.of(module)          # the shards of the last run, for checkpoints after it and for the next run
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_holmes import checkpoint
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.resuming import Resumption


class RestingShards:
    """Of the last module that was filled so; none at the start."""

    def __init__(self) -> None:
        self._shards: StageShards | None = None
        self._module: nn.Module | None = None

    def of(self, module: nn.Module) -> StageShards | None:
        """The shards in which ``module`` lives, if it does."""
        return self._shards if self._module is module else None

    def keep(self, shards: StageShards, module: nn.Module) -> None:
        """``module`` lives in ``shards`` from now on."""
        shards.stays = True
        self._shards, self._module = shards, module

    def take(self, module: nn.Module) -> StageShards | None:
        """Those of ``module``, which are not kept any more."""
        found, self._shards, self._module = self.of(module), None, None
        return found

    def fill(
        self,
        shards: StageShards,
        builder: ModuleBuilder,
        resumption: Resumption,
        pipeline: PipelineModule,
        all_gather: Callable[[Any], list[Any]],
    ) -> None:
        """Let ``shards`` of the ``pipeline``'s parameters have their first values, a checkpoint's or those that the module starts
        from. All ranks must call.

        Raises:
            UnsupportedModuleError: nothing gives a parameter a value.
            ConfigurationError: a run before has left it where it cannot be had.
        """
        saved = resumption.take_weights()
        bring_part = builder.bring_parts(pipeline, overwritten=saved is not None)
        at_once = saved is not None and checkpoint.renames(
            pipeline.module
        )  # which of the names make which is not known
        count = 0

        def bring(names: Sequence[str]) -> None:
            nonlocal count
            give_back_freed_memory()  # of the part before, which is large
            bring_part(names)
            if saved is not None and not at_once:
                count += 1
                checkpoint.load_module_state(pipeline, saved[0], strict=saved[1], only=names)

        shards.lay_out(by_elements=True, bring=bring)
        give_back_freed_memory()
        self.keep(shards, pipeline.module)
        if saved is not None and at_once:
            shards.put(lambda: checkpoint.load_module_state(pipeline, saved[0], strict=saved[1]))
        elif saved is not None:  # and the buffers; ranks that read from each other's disks read as often
            for _ in range(max(all_gather(count)) - count + 1):
                checkpoint.load_module_state(pipeline, saved[0], strict=saved[1], only=())
