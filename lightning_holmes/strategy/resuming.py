"""Resumption: what a checkpoint has brought, from when Lightning opens it until the run that goes on from it is set up.

resumption.weights = (state_dict, strict)      # the layout is not known yet
resumption.put_weights(pipeline)               # now it is: each rank reads its part; all ranks must call
"""

from collections.abc import Mapping
from typing import Any

from lightning_holmes import checkpoint
from lightning_holmes.pipeline.stage import PipelineModule


class Resumption:
    """Of the next run of a strategy; what is taken is gone.

    Attributes:
        weights: a module's state by names, and whether it must fit exactly.
        seed: of the run that was saved, from which dropout goes on.
        num_microbatches: with which it draws for the same samples.
    """

    def __init__(self) -> None:
        self.weights: tuple[Mapping[str, Any], bool] | None = None
        self.seed: int | None = None
        self.num_microbatches: int | None = None

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
