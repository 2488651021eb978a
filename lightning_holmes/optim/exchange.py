"""The exchanges of today (comm/exchange.py): parameters on every replica, with whole or with sharded optimizer states.

exchange            parameters          fetch, release      reduce              states
Replicated          on every replica    nothing             sum over replicas   on every replica
ShardedStates       on every replica    nothing, see there  sum of the share    1/dp (ZeRO stage 1, arXiv 1910.02054)
"""

from torch import Tensor

from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.sharded import ShardedOptimizer


class Replicated:
    """Every replica holds all parameters of its stages; gradients are summed over the replicas.

    Buckets that the last backward of a stage fills are reduced while it goes on, and end where the stage ends.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def fetch(self, stage: int) -> None:
        """Nothing: parameters are here."""

    def release(self, stage: int) -> None:
        """Nothing: they stay."""

    def last_backward(self, stage: int) -> None:
        """Buckets of ``stage`` may be reduced from now on, as they become full."""
        self._reducer.last_backward(stage)

    def reduce(self, stage: int) -> None:
        """Whatever of ``stage`` is not on its way yet. Every rank of the replicas calls."""
        self._reducer.reduce(stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """Gather a gradient of a split backward."""
        self._reducer.add(name, gradient)


class ShardedStates(Replicated):
    """The same, where each replica steps its share (ZeRO stage 1): it gets the sums of that share only, and updated
    parameters are gathered after the optimizer's step.

    That gathering runs on into the next forward, bucket by bucket, and whoever reads a parameter waits for its bucket
    (param_gather.py): a fetch that waited for a whole stage would hide less.
    """

    def __init__(self, reducer: GradientReducer, shards: ShardedOptimizer) -> None:
        super().__init__(reducer)
        reducer.on_laid_out = shards.prepare
        if not shards.whole_gradients:
            reducer.reduce_shares()
