"""RankMemory: the bytes that a rank holds for each part of a model; stage_in_flight: the number of microbatches in flight; lack_of_memory:
whether the optimizer's state fits.

    memory = RankMemory(training=training, tensor=2, shards=8)
    memory.static_bytes(layer)              # parameters, gradients, optimizer states
    memory.place_bytes(layer, in_flight=4)  # these plus the activations of four microbatches

A rank holds parameters, gradients and optimizer states of its stages (with optimizer nodes none of them, or the parameters alone);
and activations of the microbatches in flight. Tensor parallelism shards all of this except
activations between its parts. A sharded optimizer also shards the states, sharded parameters also shard parameters and gradients;
with sharded parameters or optimizer nodes, two stages at a time are held unsharded in addition. Not modelled: fragmentation, the
workspace of libraries, temporary copies of gradients in another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_holmes.plan.layer_cost import LayerCost
from lightning_holmes.plan.schedule import make_schedule, max_in_flight, spec_of
from lightning_holmes.plan.training import Training

_USABLE = 0.9  # of the free memory; activations need some of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory model of a rank.

    Attributes:
        tensor: the tensor-parallel size. Activations between tensor-parallel parts are not sharded, unless
            training.sequence_parallel.
        shards: number of shards of the optimizer's states; with ``training.sharded_parameters`` also of parameters and gradients.
    """

    training: Training
    tensor: int = 1
    shards: int = 1

    def static_bytes(self, place: LayerCost) -> float:
        """Bytes that a layer, or what runs before or after the layers, holds all the time."""
        training = self.training
        if training.optimizer_nodes:
            return 0.0
        if training.sharded_parameters:
            held = place.parameter_bytes + place.trained_bytes * (training.gradient_ratio + training.state_ratio)
            return held / self.shards / self.tensor
        trained = place.trained_bytes * (training.gradient_ratio + training.state_ratio / self.shards)
        return (place.parameter_bytes + trained) / self.tensor

    def whole_bytes(self, place: LayerCost) -> float:
        """Bytes of unsharded parameters and gradients, in addition to the shards, while ``place`` is computed; 0 without sharded_parameters."""
        if not self.training.sharded_parameters:
            return 0.0
        return (place.parameter_bytes + place.trained_bytes * self.training.gradient_ratio) / self.tensor

    def held_bytes(self, place: LayerCost) -> float:
        """Bytes of activations of one microbatch held from forward to backward."""
        undivided = 0.0 if self.training.sequence_parallel else place.undivided
        return undivided + (place.held_bytes - undivided) / self.tensor

    def place_bytes(self, place: LayerCost, in_flight: float) -> float:
        """static_bytes, plus held_bytes for ``in_flight`` microbatches."""
        return self.static_bytes(place) + in_flight * self.held_bytes(place)


@lru_cache(maxsize=4096)
def stage_in_flight(schedule: str, ranks: int, num_microbatches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """For each stage, the number of microbatches that it holds when its rank holds the most."""
    spec = spec_of(schedule)
    closed_form = spec.in_flight
    if closed_form is not None and (num_chunks == 1 or spec.is_layered or num_microbatches % ranks == 0):
        return closed_form(ranks, num_microbatches, num_chunks)
    made = make_schedule(
        schedule, pipeline_parallel_size=ranks, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    # an upper bound: as if each chunk held all of the microbatches that its rank holds at most
    most = max_in_flight(made)
    return tuple(min(num_microbatches, most[made.rank_of(stage)]) for stage in range(ranks * num_chunks))


def lack_of_memory(ranks: Sequence[tuple[float, float]]) -> str | None:
    """On which rank the optimizer's whole state does not fit, in words; None if it fits on all.

    Args:
        ranks: for each rank the bytes of the state for all its parameters, and the bytes that are free for it beside parameters and gradients.
    """
    for rank, (state_bytes, free_bytes) in enumerate(ranks):
        if state_bytes > _USABLE * free_bytes:
            free = max(0.0, free_bytes / 2**30)
            return f"{state_bytes / 2**30:.3g} GiB of state do not fit the {free:.3g} GiB that are free on rank {rank}"
    return None
