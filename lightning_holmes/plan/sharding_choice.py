"""Decides whether the optimizer is sharded over replicas because its whole state does not fit. Plain data, no torch.

lack = lack_of_memory(facts)          # facts: what each rank knows
lack                                  # "3.1 GiB of state do not fit the 2.0 GiB that are free on rank 1", or None
"""

from collections.abc import Sequence
from dataclasses import dataclass

_USABLE = 0.9  # of the free memory; activations need some of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFacts:
    """The figures of one rank: bytes of the optimizer's state for all its parameters, and bytes that are free for it beside parameters and
    gradients."""

    state_bytes: int
    free_bytes: int


def lack_of_memory(facts: Sequence[ShardingFacts]) -> str | None:
    """Return on which rank the whole state does not fit, in words; None if it fits on all."""
    for rank, fact in enumerate(facts):
        if fact.state_bytes > _USABLE * fact.free_bytes:
            state, free = _size(fact.state_bytes), _size(max(0, fact.free_bytes))
            return f"{state} of state do not fit the {free} that are free on rank {rank}"
    return None


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
