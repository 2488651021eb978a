"""Resumption: what a checkpoint has brought, from when Lightning opens it until the run that goes on from it is set up.

resumption.weights = (state_dict, strict)      # the layout is not known yet
resumption.put_weights(pipeline)               # now it is: each rank reads its part; all ranks must call
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.pipeline.stage import PipelineModule

Load = Callable[[Optimizer, Mapping[str, Any]], None]
"""Puts a saved state into an optimizer."""


class Resumption:
    """Of the next run of a strategy; what is taken is gone.

    Attributes:
        weights: a module's state by names, and whether it must fit exactly.
        seed: of the run that was saved, from which dropout goes on.
        num_microbatches: with which it draws for the same samples.
        optimizers: states that wait until it is known which of them this rank holds.
    """

    def __init__(self) -> None:
        self.weights: tuple[Mapping[str, Any], bool] | None = None
        self.seed: int | None = None
        self.num_microbatches: int | None = None
        self.optimizers: list[tuple[Optimizer, Mapping[str, Any]]] = []

    def put_weights(self, pipeline: PipelineModule) -> None:
        """Put the weights, where there are any, into what this rank holds. All ranks must call."""
        if self.weights is not None:
            (saved, strict), self.weights = self.weights, None
            checkpoint.load_module_state(pipeline, saved, strict=strict)

    def take_seed(self) -> int | None:
        """The seed, once."""
        seed, self.seed = self.seed, None
        return seed

    def take_num_microbatches(self) -> int | None:
        """The number, once."""
        count, self.num_microbatches = self.num_microbatches, None
        return count
    def hold_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Keep states for later; learning rates and other settings are theirs at once."""
        self.optimizers = list(zip(optimizers, states, strict=False))  # none, or fewer, as Lightning
        for optimizer, state in self.optimizers:
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
                group.update(_settings(saved))

    def put_optimizers(self, load: Load) -> None:
        """Put the states, where some wait, into what this rank holds; settings that have changed meanwhile stay."""
        waiting, self.optimizers = self.optimizers, []
        for optimizer, state in waiting:
            settings = [_settings(group) for group in optimizer.param_groups]
            load(optimizer, state)
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update(own)

    def show_optimizers(self, load: Load) -> Callable[[], None]:
        """Put waiting states in for a moment, say to save them; what this returns takes them out again."""
        waiting = list(self.optimizers)
        self.put_optimizers(load)

        def hide() -> None:
            self.optimizers = waiting
            for optimizer, _ in waiting:
                optimizer.state.clear()

        return hide


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
