"""LayerCost and ModelCost: the costs of one microbatch, layer by layer. Plain data; and checks of numbers that users give.

pipeline/profile.py counts the numbers; files and tests give them by hand. cost_model.py converts them to seconds on a
device.

    block = LayerCost(forward=6e12, backward=12e12, parameter_bytes=4e8, activation_bytes=3e7, held_bytes=1e9)
    model = ModelCost(microbatch_samples=1, before=embedding, layers=(block,) * 48, after=head)
    model.for_samples(4).layers[0].forward      # 24e12

"work" is in FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_holmes.errors import ConfigurationError

_UNDIVIDED = 4
_OF_SAMPLES: tuple[str, ...] = (
    "forward",
    "backward",
    "activation_bytes",
    "held_bytes",
    "forward_moved_bytes",
    "backward_moved_bytes",
)
_OF_SAMPLES += ("recomputed", "undivided_bytes")


def check_number(value: Any, what: str, *, positive: bool = False) -> float:
    """Return the value as a float; raise ConfigurationError unless it is finite and at least zero (above zero if ``positive``)."""
    wanted = "a positive, finite number" if positive else "a finite number of zero or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{what}={value!r} is not a number; write {wanted}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ConfigurationError(f"{what}={value!r} is not allowed; write {wanted}")
    return float(value)


def check_count(value: Any, what: str, *, minimum: int = 1) -> int:
    """Return the value; raise ConfigurationError unless it is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{what}={value!r} is not allowed; write a whole number, at least {minimum}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer (or of what runs before or after the layers) for one microbatch.

    forward, backward: work. parameter_bytes: weights, in the type they are computed with. gradient_bytes: bytes of
    the weights that are trained (all, by default). activation_bytes: bytes sent one way at a split point after the layer.
    held_bytes: activations held from forward to backward. fixed_forward_s, fixed_backward_s: seconds that do not
    grow with the microbatch (kernel launches, Python). In addition to counted FLOPs: forward_products,
    backward_products: the number of matrix products; forward_moved_bytes, backward_moved_bytes: bytes that all other operators
    read and write in the device's memory. recomputed: the part of backward that is forward work which the module itself runs again.
    undivided_bytes: the part of held_bytes that tensor parallelism does not shard; by default four times activation_bytes (at most
    held_bytes): the inputs and outputs of a transformer layer's two norms (Korthikanti et al. 2022, section 4, without dropout).
    """

    forward: float
    backward: float
    parameter_bytes: float = 0.0
    gradient_bytes: float | None = None
    activation_bytes: float = 0.0
    held_bytes: float = 0.0
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    forward_products: float = 0.0
    backward_products: float = 0.0
    forward_moved_bytes: float = 0.0
    backward_moved_bytes: float = 0.0
    recomputed: float = 0.0
    undivided_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.gradient_bytes is None:
            object.__setattr__(self, "gradient_bytes", self.parameter_bytes)
        if self.undivided_bytes is None:
            object.__setattr__(self, "undivided_bytes", min(self.held_bytes, _UNDIVIDED * self.activation_bytes))

    @property
    def trained_bytes(self) -> float:
        """gradient_bytes, never None."""
        assert self.gradient_bytes is not None
        return self.gradient_bytes

    def scaled(self, factor: float) -> LayerCost:
        """The cost of a microbatch of ``factor`` times as many samples: weights, numbers of products and fixed seconds do not change."""
        return replace(self, **{name: getattr(self, name) * factor for name in _OF_SAMPLES})

    @property
    def undivided(self) -> float:
        """undivided_bytes, never None."""
        assert self.undivided_bytes is not None
        return self.undivided_bytes


NOTHING = LayerCost(forward=0.0, backward=0.0)
"""The cost where nothing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The costs of a module for a microbatch of microbatch_samples samples.

    before: what runs before the layers (embedding; its activation_bytes are the first layer's input).
    after: what runs after them (norm, head, loss). shared_bytes: parameters that both use (tied embeddings);
    they are counted in each, and their gradients are summed between the first and the last stage.
    forbidden_cuts: layers after which no stage may end. tokens_per_sample: for reports. parameter_itemsize,
    activation_itemsize: bytes per element of trained parameters, and of the tensors sent between stages; averages if types are mixed.
    layer_list: the name of the layer list in the module. num_parameters: of the module, if known.
    """

    microbatch_samples: int
    layers: tuple[LayerCost, ...]
    before: LayerCost = NOTHING
    after: LayerCost = NOTHING
    shared_bytes: float = 0.0
    forbidden_cuts: tuple[int, ...] = ()
    tokens_per_sample: int | None = None
    parameter_itemsize: float = 4.0
    activation_itemsize: float = 4.0
    num_parameters: int | None = None
    layer_list: str = "layers"
    name: str = "model"

    @property
    def num_layers(self) -> int:
        """The length of the layer list."""
        return len(self.layers)

    @property
    def places(self) -> tuple[LayerCost, ...]:
        """before, the layers, after."""
        return (self.before, *self.layers, self.after)

    @property
    def forward(self) -> float:
        """Forward work of a microbatch through the whole model."""
        return math.fsum(place.forward for place in self.places)

    @property
    def backward(self) -> float:
        """Backward work of a microbatch through the whole model."""
        return math.fsum(place.backward for place in self.places)

    @property
    def recomputed(self) -> float:
        """The part of the backward work that is forward work run again."""
        return math.fsum(place.recomputed for place in self.places)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all weights; shared weights count once."""
        return math.fsum(place.parameter_bytes for place in self.places) - self.shared_bytes

    def for_samples(self, samples: int) -> ModelCost:
        """The costs of a microbatch of another number of samples; see LayerCost.scaled."""
        factor = samples / self.microbatch_samples
        alike: dict[LayerCost, LayerCost] = {place: place.scaled(factor) for place in set(self.places)}
        return replace(
            self,
            microbatch_samples=samples,
            before=alike[self.before],
            layers=tuple(alike[layer] for layer in self.layers),
            after=alike[self.after],
        )
