"""RankMemory: the bytes that a rank holds for each part of a model, and for how many microbatches at a time.

    memory = RankMemory(training=training, tensor=2, shards=8)
    memory.static_bytes(layer)              # parameters, gradients, optimizer states
    memory.place_bytes(layer, in_flight=4)  # and the activations of four microbatches

Parameters, gradients and optimizer states of a rank's stages, or, with optimizer nodes, none of them; held activations of the microbatches in flight; what one
layer holds while it is recomputed. Tensor parallelism divides it, but for activations between its parts; sharding the states, or
the parameters and gradients, too, beside which two stages are whole then, as with optimizer nodes. Not modelled:
fragmentation, the workspace of libraries, copies of gradients in another type that a step makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_holmes.plan.layer_cost import LayerCost
from lightning_holmes.plan.schedule import make_schedule, max_in_flight, spec_of
from lightning_holmes.plan.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """How a rank holds what it holds.

    Attributes:
        tensor: the tensor-parallel size. What lies between the parts that it divides is whole on each rank, unless
            training.sequence_parallel.
        shards: parts into which the optimizer's states are sharded; with ``training.sharded_parameters`` all that is held.
        recomputation: layers run again in their backward.
    """

    training: Training
    tensor: int = 1
    shards: int = 1
    recomputation: bool = False

    def static_bytes(self, place: LayerCost) -> float:
        """What a layer, or what runs before or after the layers, holds all the time."""
        training = self.training
        if training.optimizer_nodes:
            return place.parameter_bytes / self.tensor if training.keeps_parameters else 0.0
        if training.sharded_parameters:
            held = place.parameter_bytes + place.trained_bytes * (training.gradient_ratio + training.state_ratio)
            return held / self.shards / self.tensor
        trained = place.trained_bytes * (training.gradient_ratio + training.state_ratio / self.shards)
        return (place.parameter_bytes + trained) / self.tensor

    def whole_bytes(self, place: LayerCost) -> float:
        """What it takes beside its shards while it is computed: parameters and gradients; 0 where it is whole all the time."""
        if not self.training.sharded_parameters:
            return 0.0
        parameters = 0.0 if self.training.keeps_parameters else place.parameter_bytes
        return (parameters + place.trained_bytes * self.training.gradient_ratio) / self.tensor

    def held_bytes(self, place: LayerCost) -> float:
        """What it keeps of one microbatch from forward to backward; of the costs with recomputation where there is some."""
        undivided = 0.0 if self.training.sequence_parallel else place.undivided
        return undivided + (place.held_bytes - undivided) / self.tensor

    def place_bytes(self, place: LayerCost, in_flight: float) -> float:
        """Both, with so many microbatches in flight."""
        return self.static_bytes(place) + in_flight * self.held_bytes(place)

    def transient_bytes(self, layer: LayerCost) -> float:
        """What a layer holds beside that while it is recomputed; of the costs without recomputation."""
        return self.held_bytes(layer) if self.recomputation else 0.0


@lru_cache(maxsize=4096)
def stage_in_flight(schedule: str, ranks: int, num_microbatches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """For each stage, the microbatches it holds when its rank holds the most."""
    spec = spec_of(schedule)
    closed_form = spec.in_flight
    if closed_form is not None and (num_chunks == 1 or spec.is_layered or num_microbatches % ranks == 0):
        return closed_form(ranks, num_microbatches, num_chunks)
    made = make_schedule(
        schedule, pipeline_parallel_size=ranks, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    # an upper bound: a rank's most, as if each of its chunks held as much of it as it can
    most = max_in_flight(made)
    return tuple(min(num_microbatches, most[made.rank_of(stage)]) for stage in range(ranks * num_chunks))
