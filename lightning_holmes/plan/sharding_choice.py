"""Decides whether the optimizer is sharded over replicas, for sharded_optimizer="auto". Plain data, no torch.

choice = choose_sharding(facts)          # facts: what each rank has measured
choice.on, choice.reason
"""

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_BYTES = 64 * 2**20
"""Sharding less optimizer state than this gains nothing: about the state of a model of 8 M parameters with Adam."""
_USABLE = 0.9  # of the free memory; activations need some of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFacts:
    """The figures of one rank.

    Attributes:
        state_bytes: of the optimizer's state for all parameters of the rank.
        free_bytes: free memory after parameters and gradients are allocated.
        whole_s: seconds to sum the gradients over replicas and run the optimizer's step for all parameters.
        sharded_s: seconds to sum the gradients of each rank's shard, run the step for the shard, and all-gather the parameters.
    """

    state_bytes: int
    free_bytes: int
    whole_s: float
    sharded_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """Whether the optimizer is sharded, and the reason in words."""

    on: bool
    reason: str

    def describe(self) -> str:
        """The choice in one line."""
        return f"Sharded optimizer: {'on' if self.on else 'off'}, {self.reason}"


def choose_sharding(facts: Sequence[ShardingFacts]) -> ShardingChoice:
    """Shard if the whole state does not fit on some rank; otherwise if the state is not small and sharding is not slower on the slowest rank."""
    most = max(fact.state_bytes for fact in facts)
    for rank, fact in enumerate(facts):
        if fact.state_bytes > _USABLE * fact.free_bytes:
            return ShardingChoice(
                on=True,
                reason=f"since {_size(fact.state_bytes)} of state do not fit the {_size(fact.free_bytes)} that are free on rank {rank}",
            )
    if most < SMALL_BYTES:
        return ShardingChoice(on=False, reason=f"since its state is only {_size(most)} a rank")
    whole, shares = max(f.whole_s for f in facts), max(f.sharded_s for f in facts)
    times = (
        f"measured {1e3 * shares:.1f} ms for its share of a step with gradients and parameters sent, {1e3 * whole:.1f} ms "
        f"for the whole step with gradients sent"
    )
    return ShardingChoice(on=shares <= whole, reason=times)


def needs_times(facts: Sequence[ShardingFacts]) -> bool:
    """Whether the choice depends on times, since memory and size alone do not decide."""
    return choose_sharding(facts).reason.startswith("measured")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
