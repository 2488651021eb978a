"""Modules larger than the memory of one process: built without memory, and materialized part by part on the ranks that need them.

Decides when a module is built so, and keeps a rank's parameters from one run to the next; the building itself is in
:mod:`lightning_holmes.pipeline.deferred`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_holmes.checkpoint import broadcast_from
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.deferred import DeferredModule, has_fake_tensors
from lightning_holmes.pipeline.stage import PipelineModule

# attributes that are set on a module built without memory
_HELD = "_holmes_held_parameters"  # after a run: the names of the parameters that this rank holds
_UNFILLED = "_holmes_unfilled"  # after a run that ended before its first batch: the DeferredModule

WAITS = (
    "configure_model built the module without memory, and a rank gets the values of its parameters with the first batch: read or "
    "save them in on_before_zero_grad of that batch or later, or build the module in __init__"
)
"""Why a parameter has no values yet, and what to do."""


class ModuleBuilder:
    """Builds the module of one run.

    Args:
        seed: returns a seed that all ranks share; a collective, which all ranks call at the same places.
        device: the device of this rank's parameters.
    """

    def __init__(self, seed: Callable[[], int], device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._deferred: DeferredModule | None = None
        self._kept: dict[str, nn.Parameter] = {}
        self.waits = False
        """Whether the module's parameters have no values yet."""

    @contextmanager
    def configuring(
        self, module: "pl.LightningModule", initialising: Callable[[], AbstractContextManager[None]]
    ) -> Generator[None, None, None]:
        """Inside, run ``configure_model`` without allocating its tensors.

        If it cannot run so (for example, because it reads weights by its own code), it runs again with real tensors, in ``initialising()``.
        """
        deferred = DeferredModule(self._seed(), self._device)
        before = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        try:
            with deferred.building():
                yield
        except Exception as error:
            vars(module).clear()
            vars(module).update(before)
            pl.utilities.rank_zero_warn(
                f"{type(module).__name__}.configure_model cannot run without memory, so each process builds the whole "
                f"module ({type(error).__name__}: {error})"
            )
            with initialising():
                module.configure_model()
        if has_fake_tensors(module):
            self._deferred = deferred

    def adopt(self, module: "pl.LightningModule") -> None:
        """Take over parameters without values: from ``configure_model``, on the meta device, or not held by this rank in an earlier run."""
        held, unfilled = vars(module).get(_HELD), vars(module).pop(_UNFILLED, None)
        if self._deferred is None and unfilled is not None:
            self._deferred = unfilled
            return
        if held is not None or (self._deferred is None and has_fake_tensors(module)):
            self._deferred = DeferredModule(self._seed(), self._device)
        if self._deferred is not None:
            self._deferred.adopt(module)
        if held is not None and self._deferred is not None:
            # make all parameters placeholders for now, so that every rank compares the same tensors; fill() puts the held ones back
            self._kept = {n: p for n, p in module.named_parameters() if n in held}
            self._deferred.forget({n for n, _ in module.named_parameters()})

    @property
    def waiting(self) -> frozenset[str]:
        """The names of the parameters that have no values yet."""
        return self._deferred.places if self._deferred is not None and self.waits else frozenset()

    @property
    def defers(self) -> bool:
        """Whether the module was built without memory, so that ranks hold parts of it."""
        return self._deferred is not None

    def begin(self, pipeline: PipelineModule, *, is_pipeline: bool, overwritten: bool) -> None:
        """If ranks hold parts of the module (``is_pipeline``), make its parameters placeholders until :meth:`fill`; else materialize the whole
        module.

        Args:
            overwritten: a checkpoint will be read into the parameters.

        Raises:
            UnsupportedModuleError: nothing initialises a tensor.
            ConfigurationError: the whole module is needed here, but this rank held only a part of it in an earlier run.
        """
        if self._deferred is None:
            return
        if is_pipeline:
            self._deferred.hold_places(getattr(pipeline.module, "read_weights", None), overwritten=overwritten)
            self.waits = True
        else:
            kept = self.fill(pipeline, overwritten=overwritten)
            if kept is not None and pipeline.local_parameters - kept:
                raise ConfigurationError(_lost(min(pipeline.local_parameters - kept), "this rank"))
            self._deferred = None

    def building(self) -> AbstractContextManager[None]:
        """Inside, tensors that are made from the module's tensors have no memory either."""
        return nullcontext() if self._deferred is None else self._deferred.building()

    def stand_ins(self) -> AbstractContextManager[None]:
        """Inside, the module can be run on this rank, with stand-ins for its values."""
        return nullcontext() if self._deferred is None else self._deferred.stand_ins()

    def fill(self, pipeline: PipelineModule, *, overwritten: bool) -> set[str] | None:
        """Materialize the parameters that this rank's stages need.

        Args:
            overwritten: a checkpoint will be read into them.

        Returns:
            If each rank holds a part of the module from an earlier run: the names of the parameters that this rank has now;
            other parameters that its stages need must still be brought from other ranks. Else None.
        """
        if self._deferred is None:
            return None
        self.waits = False
        local = pipeline.local_parameters
        if vars(pipeline.module).pop(_HELD, None) is None:
            self._deferred.materialise(local, getattr(pipeline.module, "read_weights", None), overwritten=overwritten)
            return None
        kept, self._kept = self._kept, {}
        if overwritten:
            self._deferred.materialise(local, overwritten=True)
            return None
        self._deferred.materialise(set(kept), lambda names: {n: kept[n].detach() for n in names if n in kept})
        return set(kept)

    def bring_parts(self, pipeline: PipelineModule, *, overwritten: bool) -> Callable[[Sequence[str]], None]:
        """Return a function that materializes the parameters of given names, to be used instead of :meth:`fill` for one part of the module at a
        time.

        Args:
            overwritten: all values come from elsewhere.

        Raises:
            ConfigurationError: in an earlier run this rank held only a part of the parameters that its stages need.
        """
        assert self._deferred is not None
        deferred, kept = self._deferred, self._kept
        self.waits = False
        was_held = vars(pipeline.module).pop(_HELD, None) is not None
        read = (lambda names: {n: kept[n].detach() for n in names if n in kept}) if was_held else None
        lacking = pipeline.local_parameters - set(kept) if was_held and not overwritten else set()
        if lacking:
            raise ConfigurationError(_lost(min(lacking), "this rank"))
        read = read or getattr(pipeline.module, "read_weights", None)
        return lambda names: deferred.materialise(set(names), None if overwritten else read, overwritten=overwritten)

    def leave(self, pipeline: PipelineModule, *, in_shards: bool) -> bool:
        """After a run, note on the module which of its parameters this rank holds. Return False if the module was not built without memory, so that
        each rank may have it whole.

        Args:
            in_shards: the parameters are in shards, so that no rank has a whole one.
        """
        if self._deferred is None:
            return False
        if not self.waits:
            vars(pipeline.module)[_HELD] = frozenset() if in_shards else frozenset(pipeline.local_parameters)
        elif self._kept:  # there was no batch: restore what the earlier run left
            for name, parameter in pipeline.parameters.items():
                if name in self._kept:
                    dtensor.replace_local(parameter, dtensor.local_part(self._kept[name]).detach())
        else:
            vars(pipeline.module)[_UNFILLED] = self._deferred
        return True


def _lost(name: str, who: str) -> str:
    return (
        f"{name} was not held by {who} in the run before, and a module built without memory is not brought together at its end: "
        f"run with the same layout, or give the run's checkpoint as ckpt_path"
    )


def move_parameters(
    pipeline: PipelineModule,
    before: Sequence[set[str]],
    after: Sequence[set[str]],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Broadcast to each rank of the pipeline the parameters that it holds in a new layout. All ranks of the pipeline must call.

    Args:
        before: for each rank of the pipeline, the names of the parameters that it has.
        after: for each rank of the pipeline, the names of the parameters that it shall have.
        ranks: the global ranks of the pipeline, in its order; the process group sorts them.
        group: the process group of the pipeline.

    Raises:
        ConfigurationError: no rank has one of the parameters.
    """
    mine = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    for name, parameter in pipeline.parameters.items():
        if not any(name in new - old for old, new in zip(before, after, strict=True)):
            continue
        source = next((index for index, names in enumerate(before) if name in names), None)
        if source is None:
            raise ConfigurationError(_lost(name, f"any of the {len(before)} ranks of this pipeline"))
        data = broadcast_from(dtensor.detached(parameter), ranks[source], group)
        if name in after[mine] - before[mine]:
            dtensor.replace_local(parameter, data)
