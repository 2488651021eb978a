"""Refuses hooks that change parameters between a step's forward and its backward: a pipeline has run both before Lightning calls these hooks.

unchanged = UnchangedParameters(module, callbacks, lambda: held_values(pipeline, shards))
unchanged.note()        # after the step has been run, forward and backward
unchanged.check()       # when Lightning calls its backward
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.checksum import Checksum
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.user_hooks import BACKWARD_HOOKS, overridden_hooks, users_callbacks


class UnchangedParameters:
    """Compares checksums of parameters, if the user has such hooks; else does nothing. Each rank checks by itself.

    Args:
        values: returns the tensors of this rank's parameters.
    """

    def __init__(
        self, module: "pl.LightningModule", callbacks: Iterable["pl.Callback"], values: Callable[[], Sequence[Tensor]]
    ) -> None:
        found = overridden_hooks(module, users_callbacks(callbacks), BACKWARD_HOOKS)
        self._hooks = [f"{type(owner).__name__}.{hook}" for owner, hook in found]
        self._values = values
        self._before: tuple[int, int] | None = None

    def note(self) -> None:
        """Take a checksum after the step has been run."""
        if self._hooks:
            self._before = self._sums()

    def check(self) -> None:
        """Compare the checksum after the hooks have been called.

        Raises:
            UnsupportedModuleError: parameters have been changed; the message names the hooks.
        """
        before, self._before = self._before, None
        if before is not None and self._sums() != before:
            raise UnsupportedModuleError(
                f"parameters were changed between the forward and the backward of a step, where {' or '.join(self._hooks)} is called: plain "
                f"Lightning's backward computes with the changed ones, and a pipeline has run it by then. Change them in on_train_batch_start "
                f"or on_train_batch_end"
            )

    def _sums(self) -> tuple[int, int]:
        checksum = Checksum(list(self._values()))
        return checksum.known, checksum.values()


def held_values(pipeline: PipelineModule, shards: StageShards | None) -> list[Tensor]:
    """Return the trained parameters as this rank has them between steps: whole, its shards of them, or none. Frozen parameters are left out: most
    belong to a teacher, an average that such hooks update, and that no backward reads."""
    if shards is not None:
        return [unit.values for unit in shards.units if unit.is_trained]
    own = (pipeline.parameters[name] for name in sorted(pipeline.local_parameters))
    return [dtensor.local_part(parameter) for parameter in own if parameter.requires_grad]
