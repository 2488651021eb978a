"""Measures the collectives that a group could use on the group's real buckets.

    candidates = make_collectives(groups, torch.bfloat16)
    found = measure(candidates, buffers, groups.whole, queue, budget_s=1.0)      # every member must call
    found.seconds["p2p"], found.num_bytes

Buffers must hold zeros: sums of zeros leave them unchanged.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.collectives import (
    COLLECTIVE_NAMES,
    AllReduce,
    Collective,
    Hierarchical,
    Named,
    PointToPoint,
    ReduceScatter,
    Rounded,
    SyncGroups,
    sum_rounded,
)
from lightning_holmes.comm.queue import CommQueue
from lightning_holmes.errors import ConfigurationError

BUDGET_S = 1.5
"""Seconds that measuring may take; what comes around it (a first pass, agreeing) stays well under 3 s."""
_ROUNDS = 3
_FIRST_BYTES = 64 * 2**10
_GROWTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``seconds``: by name, the time that summing ``num_bytes`` took: the best of some rounds, each that of the slowest member."""

    seconds: Mapping[str, float]
    num_bytes: int


def make_collectives(groups: SyncGroups, rounded: torch.dtype | None = None) -> dict[str, Collective]:
    """The candidates for a group, by name, simplest first; tensors that cross clusters are rounded to ``rounded`` (None: not at all)."""
    plain: tuple[Collective, ...] = (AllReduce(groups.whole), ReduceScatter(groups.whole), PointToPoint(groups.whole))
    whole: dict[str, Collective] = {made.name: Named(made, groups, groups.whole) for made in plain}
    if not groups.crosses:
        return whole
    found = whole
    if rounded is not None:
        found = {name: Rounded(collective, rounded) for name, collective in whole.items()}
    if groups.inside is not None and groups.across is not None:
        across = Named(AllReduce(groups.across), groups, groups.across)

        def sum_across(part: Tensor) -> None:
            if rounded is None:
                across.sum(part)
            else:
                sum_rounded(part, rounded, across.sum)

        is_nccl = dist.get_backend(groups.inside) == "nccl"
        level: Collective = (ReduceScatter if is_nccl else PointToPoint)(groups.inside)
        level = Named(level, groups, groups.inside)
        found["hierarchical"] = Named(
            Hierarchical(level, groups.inside, sum_across, groups.whole), groups, groups.whole
        )
    return found


def check_collective(name: str, argument: str = "gradient_sync") -> None:
    """Refuse a name that no group could use.

    Raises:
        ConfigurationError: the name is unknown; the message lists the valid ones.
    """
    if name not in ("auto", *COLLECTIVE_NAMES):
        raise ConfigurationError(
            f'{argument}={name!r} is unknown; use "auto" or one of {", ".join(repr(n) for n in COLLECTIVE_NAMES)}'
        )


def measure(
    candidates: Mapping[str, Collective],
    buffers: Sequence[Tensor],
    group: dist.ProcessGroup,
    queue: CommQueue,
    *,
    shares: bool = False,
    budget_s: float = BUDGET_S,
) -> Measured:
    """Time the candidates on the largest of the first four ``buffers``, as much of it as the budget allows. All members must call.

    shares: time what a sharded optimizer needs: each member's share of the sum, and the gather of a tensor of the same
    size.
    Members agree on each time (that of the slowest), and so on every decision that follows from it. Nothing else may
    run in the queue.
    """
    buffer = max(buffers[:4], key=lambda b: b.numel() * b.itemsize)
    size = dist.get_world_size(group)

    def part(num_bytes: float) -> Tensor:
        count = max(1, int(num_bytes / buffer.itemsize / size)) * size
        return buffer[: min(buffer.numel(), count)]

    agreed = torch.zeros(len(candidates) + 1, device=buffer.device)
    began = time.perf_counter()

    def one_round(tensor: Tensor) -> tuple[list[float], float]:
        """The seconds of each candidate, and the seconds spent since the beginning."""
        for index, collective in enumerate(candidates.values()):
            agreed[index] = time_sum(collective, tensor, queue, shares=shares)
        agreed[-1] = time.perf_counter() - began
        queue.start(lambda: dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)).wait()
        *taken, spent = agreed.tolist()
        return taken, spent

    sample = part(_FIRST_BYTES)
    one_round(sample)  # makes connections and communicators
    taken, spent = one_round(sample)
    # Larger and larger parts, rather than the same part more often: the first bytes may be faster than later ones
    # (a shaper's burst, a socket's buffer), which repetitions of a small part do not show.
    while sample.numel() < buffer.numel() and spent + _GROWTH * sum(taken) < budget_s:
        sample = part(_GROWTH * sample.numel() * sample.itemsize)
        taken, spent = one_round(sample)
    for _ in range(_ROUNDS - 1):
        if spent + sum(taken) < budget_s:
            again, spent = one_round(sample)
            taken = [min(pair) for pair in zip(taken, again, strict=True)]
    return Measured(seconds=dict(zip(candidates, taken, strict=True)), num_bytes=sample.numel() * sample.itemsize)


def time_sum(collective: Collective, tensor: Tensor, queue: CommQueue, *, shares: bool = False) -> float:
    """Seconds until ``tensor`` is summed (``shares``: scattered and gathered), by this member's clock. All members must call."""
    began = time.perf_counter()
    for work in (collective.scatter, collective.gather) if shares else (collective.sum,):
        queue.start(functools.partial(work, tensor)).wait()
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began
