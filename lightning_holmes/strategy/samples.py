"""StepSample: the batch and arguments with which a step is traced; StepLoops: where it is in the trainer's loops.

    sample = StepSample(step_name="training_step", batch=batch, arguments=(0,))
    loops = StepLoops(trainer)
    loops.is_last_batch(sample), loops.num_before("validation_step")

A run traces its module on the batches that Lightning passes (tracing.py); ``check`` and ``plan`` are given a batch.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import active_loop, loaders_of


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


class StepLoops:
    """The loops of a trainer by the names of the steps that they run."""

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer

    def _loop_of(self, step_name: str) -> Any:
        if step_name == "training_step":
            return self._trainer.fit_loop
        fitting = self._trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        return self._trainer.fit_loop.epoch_loop.val_loop if fitting else active_loop(self._trainer)

    def is_last_batch(self, sample: StepSample) -> bool:
        """Whether this rank's loader has no batch after this one."""
        loop = self._loop_of(sample.step_name)
        if sample.step_name == "training_step":
            return bool(loop.epoch_loop.batch_progress.is_last_batch)
        if loop is None or loop.batch_progress.is_last_batch:
            return True
        arguments = sample.arguments
        return bool(arguments) and arguments[0] + 1 >= loop.max_batches[sample.loader_index]

    def num_before(self, step_name: str) -> tuple[int, int]:
        """How many batches have been trained, and how many this pass of an evaluation loop has begun, over all its loaders."""
        loop = self._loop_of(step_name)
        begun = 0 if loop is None else loop.batch_progress.current.ready
        return self._trainer.fit_loop.epoch_loop.total_batch_idx, begun

    def loaders_of(self, step_name: str) -> list[Any]:
        """The loaders that give the step its batches."""
        loop = self._loop_of(step_name)
        return [] if loop is None else loaders_of(loop)
