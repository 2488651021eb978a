"""Modules larger than one process: built without memory, filled where a rank needs them.

Decides when a module is built so, and keeps what a rank holds from one run to the next; how is
:mod:`lightning_holmes.pipeline.deferred`'s.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.pipeline.deferred import DeferredModule, has_fake_tensors
from lightning_holmes.pipeline.stage import PipelineModule

_HELD = "_holmes_held_parameters"  # on a module built without memory, after a run: the parameters that this rank has


class ModuleBuilder:
    """Builds the module of one run.

    Args:
        seed: gives a seed that all ranks share; a collective, called by all ranks at the same places.
    """

    def __init__(self, seed: Callable[[], int], device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._deferred: DeferredModule | None = None
        self._kept: dict[str, nn.Parameter] = {}

    @contextmanager
    def configuring(
        self, module: "pl.LightningModule", initialising: Callable[[], AbstractContextManager[None]]
    ) -> Generator[None, None, None]:
        """Run ``configure_model`` without giving its tensors memory.

        Where it cannot run so (it reads weights by code of its own, say) it runs again, for real, in ``initialising()``.
        """
        deferred = DeferredModule(self._seed(), self._device)
        before = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        try:
            with deferred.building():
                yield
        except Exception as error:
            vars(module).clear()
            vars(module).update(before)
            rank_zero_warn(
                f"{type(module).__name__}.configure_model cannot run without memory, so each process builds the whole "
                f"module ({type(error).__name__}: {error})"
            )
            with initialising():
                module.configure_model()
        if has_fake_tensors(module):
            self._deferred = deferred

    def adopt(self, module: "pl.LightningModule") -> None:
        """Take over parameters without values: of ``configure_model``, on the meta device, or left out by a run before."""
        held = vars(module).get(_HELD)
        if held is not None or (self._deferred is None and has_fake_tensors(module)):
            self._deferred = DeferredModule(self._seed(), self._device)
        if self._deferred is not None:
            self._deferred.adopt(module)
        if held is not None and self._deferred is not None:
            # all of them for now, so that every rank compares the same tensors; what is held comes back
            self._kept = {n: p for n, p in module.named_parameters() if n in held}
            self._deferred.forget({n for n, _ in module.named_parameters()})

    @property
    def defers(self) -> bool:
        """Whether the module was built without memory."""
        return self._deferred is not None

    def building(self) -> AbstractContextManager[None]:
        """Inside: what is made of the module's tensors has no memory either."""
        return nullcontext() if self._deferred is None else self._deferred.building()

    def stand_ins(self) -> AbstractContextManager[None]:
        """Inside: the module can be run on this rank, on stand-ins for its values."""
        return nullcontext() if self._deferred is None else self._deferred.stand_ins()

    def fill(self, pipeline: PipelineModule, *, rank: int, overwritten: bool) -> None:
        """Give memory and values to what this rank's stages need.

        Args:
            overwritten: a checkpoint will be read into them.

        Raises:
            ConfigurationError: the run before left a part that this rank needs on another.
        """
        if self._deferred is None:
            return
        local = pipeline.local_parameters
        read = getattr(pipeline.module, "read_weights", None)
        if vars(pipeline.module).pop(_HELD, None) is not None:
            kept, self._kept = self._kept, {}
            lacking = sorted(local - set(kept))
            if lacking and not overwritten:
                raise ConfigurationError(
                    f"rank {rank} needs {lacking[0]}, which it did not hold in the run before, and a module built without "
                    f"memory is not brought together at its end: run with the same layout, or give the run's checkpoint as "
                    f"ckpt_path"
                )
            read = lambda names: {n: kept[n].detach() for n in names if n in kept}  # noqa: E731
        self._deferred.materialise(local, read, overwritten=overwritten)

    def leave(self, pipeline: PipelineModule) -> bool:
        """After a run: note on the module what this rank holds of it; False if each rank may have it whole."""
        if self._deferred is None or pipeline.structure is None:
            return False
        vars(pipeline.module)[_HELD] = frozenset(pipeline.local_parameters)
        return True
