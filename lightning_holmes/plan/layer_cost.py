"""LayerCost and ModelCost: what one microbatch costs, layer by layer. Plain data with checked numbers.

Where the numbers come from is for others to know: pipeline/profile.py counts or measures them, and files and
tests write them by hand. What they mean in seconds on a device is for cost_model.py.

    block = LayerCost(forward=6e12, backward=12e12, parameter_bytes=4e8, activation_bytes=3e7, held_bytes=1e9)
    model = ModelCost(unit="flops", microbatch_samples=1, before=embedding, layers=(block,) * 48, after=head)
    model.for_samples(4).layers[0].forward      # 24e12

"work" is either FLOPs or seconds, as ModelCost.unit says. Work in seconds is that of one device; another device
does it faster or slower by its relative speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from lightning_holmes.errors import ConfigurationError

WorkUnit = Literal["flops", "seconds"]
_UNDIVIDED = 4


def check_number(value: Any, what: str, *, positive: bool = False) -> float:
    """The value as a float; ConfigurationError unless it is finite and zero or more (above zero if positive)."""
    wanted = "a positive, finite number" if positive else "a finite number of zero or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{what}={value!r} is not a number; write {wanted}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ConfigurationError(f"{what}={value!r} is not allowed; write {wanted}")
    return float(value)


def check_count(value: Any, what: str, *, minimum: int = 1) -> int:
    """The value itself; ConfigurationError unless it is a whole number of at least minimum."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{what}={value!r} is not allowed; write a whole number, at least {minimum}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer (or what runs before or after the layers) costs for one microbatch.

    forward, backward: work. parameter_bytes: weights, in the type they are computed with. gradient_bytes: those
    of them that train (all, by default). activation_bytes: what crosses a split point after the layer, one way.
    held_bytes: what is kept from forward to backward. fixed_forward_s, fixed_backward_s: seconds that do not
    grow with the microbatch (launching kernels, Python), whatever the unit. Beside counted FLOPs: forward_products,
    backward_products: the matrix products of which they are; forward_moved_bytes, backward_moved_bytes: what everything else
    reads and writes in the device's memory; recomputed: what of backward is the forward that the module runs again itself.
    undivided_bytes: what tensor parallelism leaves whole of held_bytes; by default four times activation_bytes: the inputs and
    outputs of a transformer layer's two norms (Korthikanti et al. 2022, section 4, without dropout).
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
        for entry in fields(self):
            if entry.name != "undivided_bytes":
                check_number(getattr(self, entry.name), entry.name)
        if self.undivided_bytes is None:
            object.__setattr__(self, "undivided_bytes", min(self.held_bytes, _UNDIVIDED * self.activation_bytes))
        check_number(self.undivided_bytes, "undivided_bytes")

    @property
    def trained_bytes(self) -> float:
        """gradient_bytes, which is never None once made."""
        assert self.gradient_bytes is not None
        return self.gradient_bytes

    def scaled(self, factor: float) -> LayerCost:
        """The cost of a microbatch of factor times as many samples: weights and fixed seconds stay."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            activation_bytes=self.activation_bytes * factor,
            held_bytes=self.held_bytes * factor,
            forward_moved_bytes=self.forward_moved_bytes * factor,
            backward_moved_bytes=self.backward_moved_bytes * factor,
            recomputed=self.recomputed * factor,
            undivided_bytes=self.undivided * factor,
        )

    @property
    def undivided(self) -> float:
        """undivided_bytes, which is never None once made."""
        assert self.undivided_bytes is not None
        return self.undivided_bytes

    def with_recomputation(self, input_bytes: float) -> LayerCost:
        """The cost if it keeps only its input; where the module recomputes by itself, that is in its costs already."""
        held = min(self.held_bytes, input_bytes)
        again = 0.0 if self.recomputed else 1.0
        return replace(
            self,
            backward=self.backward + again * self.forward,
            backward_products=self.backward_products + again * self.forward_products,
            backward_moved_bytes=self.backward_moved_bytes + again * self.forward_moved_bytes,
            fixed_backward_s=self.fixed_backward_s + again * self.fixed_forward_s,
            recomputed=self.recomputed or self.forward,
            held_bytes=held,
            undivided_bytes=min(held, max(self.undivided, input_bytes)),
        )


NOTHING = LayerCost(forward=0.0, backward=0.0)
"""The cost of a place where nothing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The costs of a module for a microbatch of microbatch_samples samples.

    before: what runs ahead of the layers (embedding; its activation_bytes are the first layer's input).
    after: what runs after them (norm, head, loss). shared_bytes: parameters that both need (tied embeddings);
    they are counted in each, and their gradients are summed between the first and the last stage.
    forbidden_cuts: layers after which no stage may end. tokens_per_sample: for reports. parameter_itemsize,
    activation_itemsize: bytes of a trained parameter's element, and of one of what crosses split points; means, where types mix.
    layer_list: the layers' name in the module. num_parameters: of the module, where it is known.
    """

    unit: WorkUnit
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

    def __post_init__(self) -> None:
        if self.unit not in ("flops", "seconds"):
            raise ConfigurationError(f'unit={self.unit!r} is not known; write "flops" or "seconds"')
        check_count(self.microbatch_samples, "microbatch_samples")
        check_number(self.shared_bytes, "shared_bytes")
        for name in ("parameter_itemsize", "activation_itemsize"):
            check_number(getattr(self, name), name, positive=True)
        if self.tokens_per_sample is not None:
            check_count(self.tokens_per_sample, "tokens_per_sample")
        if self.num_parameters is not None:
            check_count(self.num_parameters, "num_parameters", minimum=0)
        if not self.layers:
            raise ConfigurationError("layers=() is not allowed; a model has at least one layer")
        for cut in self.forbidden_cuts:
            if not 0 <= check_count(cut, "forbidden_cuts", minimum=0) < len(self.layers) - 1:
                raise ConfigurationError(
                    f"forbidden_cuts={list(self.forbidden_cuts)}: {cut} is not the index of a layer with another after it"
                )

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
        """What of that is forward work run again."""
        return math.fsum(place.recomputed for place in self.places)

    @property
    def parameter_bytes(self) -> float:
        """All weights, shared ones once."""
        return math.fsum(place.parameter_bytes for place in self.places) - self.shared_bytes

    @property
    def alike(self) -> bool:
        """Whether every layer costs the same."""
        return all(layer == self.layers[0] for layer in self.layers)

    def for_samples(self, samples: int) -> ModelCost:
        """The costs of a microbatch of another number of samples: everything but weights grows in proportion."""
        factor = check_count(samples, "samples") / self.microbatch_samples
        alike: dict[LayerCost, LayerCost] = {place: place.scaled(factor) for place in set(self.places)}
        return replace(
            self,
            microbatch_samples=samples,
            before=alike[self.before],
            layers=tuple(alike[layer] for layer in self.layers),
            after=alike[self.after],
        )

    def with_recomputation(self) -> ModelCost:
        """The costs if each layer keeps only its input and runs forward again in its backward.

        What runs before and after the layers is not recomputed. held_bytes of a layer becomes its input;
        the peak of the one layer that is being recomputed is for the memory model to add.
        """
        inputs = (self.before, *self.layers[:-1])
        alike: dict[tuple[LayerCost, float], LayerCost] = {}
        for layer, previous in zip(self.layers, inputs, strict=True):
            if (layer, previous.activation_bytes) not in alike:
                alike[layer, previous.activation_bytes] = layer.with_recomputation(previous.activation_bytes)
        layers = [alike[layer, before.activation_bytes] for layer, before in zip(self.layers, inputs, strict=True)]
        return replace(self, layers=tuple(layers))

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON that from_data reads back as an equal ModelCost."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ModelCost:
        """Read what to_data wrote. Raises ConfigurationError for unknown keys, non-local ones and bad numbers."""
        values = _known(cls, data)
        for key in ("before", "after"):
            if key in values:
                values[key] = LayerCost(**_known(LayerCost, values[key]))
        values["layers"] = tuple(LayerCost(**_known(LayerCost, layer)) for layer in values.get("layers", ()))
        values["forbidden_cuts"] = tuple(values.get("forbidden_cuts", ()))
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(f"a model's costs: {error}") from error


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise ConfigurationError(f"{cls.__name__}: unknown key {unknown[0]!r}; allowed: {', '.join(sorted(names))}")
    needed = {"forward", "backward"} if cls is LayerCost else {"unit", "microbatch_samples", "layers"}
    missing = sorted(needed - set(data))
    if missing:
        raise ConfigurationError(f"{cls.__name__}: the key {missing[0]!r} is missing")
    return cast("dict[str, Any]", dict(data))
