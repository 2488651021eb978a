"""The exchanges (comm/parameter_exchange.py): who holds parameters, gradients and optimizer states of a stage's replicas.

exchange            parameters          fetch, release      reduce              states
Replicated          on every replica    nothing             sum over replicas   on every replica
ShardedStates       on every replica    nothing, see there  sum of the share    1/dp (ZeRO stage 1, arXiv 1910.02054)
Layered             1/dp, and two       gather; let go      sum of the share    1/dp (arXiv 2106.02679)
                    stages in flight
Fetched             the same, where nothing is trained
Layered, with       on optimizer nodes  pull; let go        push                on the nodes (LuWu, arXiv 2409.00918)
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

    Buckets that the last backward of a stage fills are reduced while it goes on, and end where the stage ends.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def fetch(self, stage: int) -> None:
        """Nothing: parameters are here."""

    def release(self, stage: int) -> None:
        """Nothing: they stay."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Buckets of ``stage`` may be reduced from its last backward on, as they become full."""
        if last:
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


class Fetched:
    """Parameters live in shards, and nothing is trained: a stage is whole while it is computed."""

    def __init__(self, shards: StageShards) -> None:
        self._shards = shards

    def fetch(self, stage: int) -> Work:
        """Gather the stage over its replicas, all of which call."""
        return self._shards.fetch(stage)

    def release(self, stage: int) -> None:
        """Parameters are placeholders again; their buffer serves the stage after the next one."""
        self._shards.release(stage)

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """There is none."""
        raise AssertionError(f"a backward of stage {stage} where nothing is trained")

    def reduce(self, stage: int) -> None:
        """Nothing is reduced."""
        raise AssertionError(f"a reduction of stage {stage} where nothing is trained")

    def add(self, name: str, gradient: Tensor) -> None:
        """No gradient comes."""
        raise AssertionError(f"a gradient of {name} where nothing is trained")


class Layered(Fetched):
    """Parameters live in shards; a stage is whole while it is computed (stage_shards.py), and its gradients go to their owners
    while the stage before runs backward (layered.py). For schedules that run all microbatches through a stage before the next."""

    def __init__(self, stage_shards: StageShards, reducer: LayeredReducer, shards: OwnedStates) -> None:
        super().__init__(stage_shards)
        self._reducer = reducer
        reducer.on_laid_out = shards.prepare

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Gradients gather in the stage's buffer from its first backward on."""
        self._reducer.backward(stage, first=first, last=last)

    def reduce(self, stage: int) -> None:
        """Each replica gets the sum of its share. Every rank of the replicas calls."""
        self._reducer.reduce(stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """No schedule that lets stages go splits its backwards."""
        raise AssertionError(f"a split backward of {name} under a layered schedule")
