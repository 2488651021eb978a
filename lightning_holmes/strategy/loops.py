"""StepLoops: the trainer's loop that runs a step, and where a batch is in it.

loops = StepLoops(trainer)
loops.is_last_batch(sample), loops.num_before("validation_step")
"""

from typing import Any

from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import active_loop, loaders_of
from lightning_holmes.strategy.samples import StepSample


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
