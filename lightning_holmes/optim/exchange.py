"""The parameter exchanges (comm/parameter_exchange.py): how parameters, gradients and optimizer states are shared among replicas.

exchange            parameters          fetch, release      reduce              states
Replicated          on every replica    nothing             sum over replicas   on every replica
ShardedStates       on every replica    nothing (below)     reduce-scatter      1/dp (ZeRO stage 1, arXiv 1910.02054)
Layered             1/dp, and two       all-gather; free    reduce-scatter      1/dp (arXiv 2106.02679)
                    whole stages
Fetched             as Layered, without training
Layered, with       on optimizer nodes  pull; free          push                on the nodes (LuWu, arXiv 2409.00918)
remote.py's parts
"""

from torch import Tensor

from lightning_holmes.comm.queue import Work
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.optim.stage_shards import StageShards


class Replicated:
    """Every replica holds all parameters of its stages; gradients are summed over the replicas.

    Buckets that the last backward of a stage fills are reduced while it still runs; no bucket spans two stages.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def fetch(self, stage: int) -> None:
        """Do nothing: every replica holds the parameters."""

    def release(self, stage: int) -> None:
        """Do nothing: the parameters stay."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Reduce the buckets of ``stage`` as they are filled, from its last backward on."""
        if last:
            self._reducer.last_backward(stage)

    def reduce(self, stage: int) -> None:
        """Start the remaining reductions of ``stage``. All replicas must call."""
        self._reducer.reduce(stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient of a split backward."""
        self._reducer.add(name, gradient)


class ShardedStates(Replicated):
    """As Replicated, but each replica steps its shard (ZeRO stage 1): it gets the sums of that shard only, and updated
    parameters are gathered after the optimizer's step.

    The gathering overlaps with the next forward, bucket by bucket, and a read of a parameter waits for its bucket
    (param_gather.py): a fetch that waited for a whole stage would overlap less.
    """

    def __init__(self, reducer: GradientReducer, shards: ShardedOptimizer) -> None:
        super().__init__(reducer)
        reducer.on_laid_out = shards.prepare
        if not shards.whole_gradients:
            reducer.reduce_shares()


class Fetched:
    """Parameters are sharded, and nothing is trained: a stage is whole while it is computed."""

    def __init__(self, shards: StageShards) -> None:
        self._shards = shards

    def fetch(self, stage: int) -> Work:
        """Gather the parameters of the stage; all replicas must call."""
        return self._shards.fetch(stage)

    def release(self, stage: int) -> None:
        """Replace the parameters by placeholders; another stage may use their buffer."""
        self._shards.release(stage)

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Refuse: there is no backward."""
        raise AssertionError(f"a backward of stage {stage} where nothing is trained")

    def reduce(self, stage: int) -> None:
        """Refuse: nothing is reduced."""
        raise AssertionError(f"a reduction of stage {stage} where nothing is trained")

    def add(self, name: str, gradient: Tensor) -> None:
        """Refuse: there are no gradients."""
        raise AssertionError(f"a gradient of {name} where nothing is trained")


class Layered(Fetched):
    """Parameters are sharded; a stage is whole while it is computed (stage_shards.py), and its gradients are reduced while the
    backward of the previous stage runs (layered.py). For schedules that run all microbatches through a stage before the next."""

    def __init__(self, stage_shards: StageShards, reducer: LayeredReducer, shards: OwnedStates) -> None:
        super().__init__(stage_shards)
        self._reducer = reducer
        reducer.on_laid_out = shards.prepare

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Accumulate gradients in the stage's buffer, from its first backward on."""
        self._reducer.backward(stage, first=first, last=last)

    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of ``stage``: each replica gets the sum of its shard. All replicas must call."""
        self._reducer.reduce(stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """Refuse: no schedule that frees stages splits its backwards."""
        raise AssertionError(f"a split backward of {name} under a layered schedule")
