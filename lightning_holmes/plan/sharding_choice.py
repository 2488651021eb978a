"""Whether the optimizer is sharded over replicas, where that is left to us. Plain data, no torch.

choice = choose_sharding(facts)          # facts: what each rank has measured
choice.on, choice.reason
"""

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_BYTES = 64 * 2**20
"""Optimizer state below which there is nothing to win: about that of a model of 8 M parameters under Adam."""
_USABLE = 0.9  # of the free memory; activations want some of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFacts:
    """What one rank knows.

    Attributes:
        state_bytes: of the optimizer's state for all parameters of the rank.
        free_bytes: of memory, with parameters and gradients in place.
        whole_s: seconds of summing gradients over replicas, and stepping all parameters.
        sharded_s: seconds of summing each rank's share, stepping that, and gathering parameters.
    """

    state_bytes: int
    free_bytes: int
    whole_s: float
    sharded_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """Whether it is sharded, and why, for people."""

    on: bool
    reason: str

    def describe(self) -> str:
        """One line."""
        return f"Sharded optimizer: {'on' if self.on else 'off'}, {self.reason}"


def choose_sharding(facts: Sequence[ShardingFacts]) -> ShardingChoice:
    """Sharded where the state does not fit some rank whole; else where it is not slower on the slowest rank."""
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
    """Whether memory alone does not decide."""
    return choose_sharding(facts).reason.startswith("measured")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
