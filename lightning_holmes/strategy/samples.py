"""StepSample: the batch and arguments with which a step is traced.

    sample = StepSample(step_name="training_step", batch=batch, arguments=(0,))

A run traces its module on the batches that Lightning passes (tracing.py); ``check`` and ``plan`` are given a batch.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_holmes.lightning_package import pl


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """The arguments of a call of a step: a batch, on the device, and the arguments after it."""

    step_name: str
    batch: Any
    arguments: tuple[Any, ...]

    @property
    def loader_index(self) -> int:
        """The loader of the batch among several evaluation loaders."""
        return self.arguments[1] if len(self.arguments) > 1 else 0


def step_arguments(module: nn.Module, step_name: str) -> tuple[int, ...]:
    """Return the arguments that Lightning passes after the batch, for the first batch of a single loader: the batch index, if the step takes one."""
    takes_index = pl.utilities.signature_utils.is_param_in_hook_signature(
        getattr(module, step_name), "batch_idx", min_args=2
    )
    return (0,) if takes_index else ()
