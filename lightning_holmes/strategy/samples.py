"""A batch for a step that is to be tried: what the step is called with.

    sample = StepSample(step_name="training_step", batch=batch, arguments=(0,))

A run learns its module from the batches that Lightning brings (tracing.py); ``check`` and ``plan`` are given one.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """What a step is called with: a batch, on the device, and the arguments after it."""

    step_name: str
    batch: Any
    arguments: tuple[Any, ...]


def step_arguments(module: nn.Module, step_name: str) -> tuple[int, ...]:
    """What Lightning gives a step after its first batch, from the only loader: the index of the batch, if it takes it."""
    takes_index = is_param_in_hook_signature(getattr(module, step_name), "batch_idx", min_args=2)
    return (0,) if takes_index else ()
