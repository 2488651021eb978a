"""The layer list of a module: the nn.ModuleList or nn.Sequential that a pipeline is split along.

It is found by trying: a step of a copy must call the layers once each and in order.

    structure = along_layers(module, "training_step", "auto", trace)      # trace(name) raises NotTheLayersError for other lists
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.torch_private import registered_modules

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """A candidate: its ``name`` in the LightningModule, and the number of its layers and of their parameters."""

    name: str
    num_layers: int
    num_parameters: int

    def describe(self) -> str:
        """``model.layers (12 layers, 85.1 M parameters)``."""
        return f"{self.name} ({self.num_layers} layers, {self.num_parameters / 1e6:.3g} M parameters)"


def find_layer_lists(module: nn.Module) -> list[LayerList]:
    """Every outermost nn.ModuleList or nn.Sequential of at least two modules, the largest first.

    Lists inside the layers of a larger list (experts, the parts of a block) are not candidates.
    """
    found = []
    for name, child in module.named_modules():
        if name and isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= 2:
            count = sum(p.numel() for p in child.parameters())
            if count:
                found.append(LayerList(name=name, num_layers=len(child), num_parameters=count))
    found.sort(key=lambda c: (-c.num_parameters, len(c.name)))
    kept: list[LayerList] = []
    for candidate in found:
        if not any(candidate.name.startswith(outer.name + ".") for outer in kept):
            kept.append(candidate)
    return kept


def candidate_layer_lists(module: nn.Module, layers: str) -> list[LayerList]:
    """The lists to try: the one named ``layers``, or with "auto" all of them, the largest first.

    Raises:
        ConfigurationError: there is no list, or none of that name; the message names the candidates.
    """
    found = find_layer_lists(module)
    listing = "; ".join(c.describe() for c in found) or "none"
    if layers == "auto":
        if not found:
            raise ConfigurationError(
                f"{type(module).__name__} has no nn.ModuleList or nn.Sequential of two or more layers to split a "
                f"pipeline along; put its layers into an nn.ModuleList, or use pipeline_parallel_size=1"
            )
        return found
    try:
        chosen = module.get_submodule(layers)
    except AttributeError:
        raise ConfigurationError(
            f"layers={layers!r}: {type(module).__name__} has no such module; candidates: {listing}"
        ) from None
    if not isinstance(chosen, (nn.ModuleList, nn.Sequential)):
        raise ConfigurationError(
            f"layers={layers!r} is a {type(chosen).__name__}, not an nn.ModuleList or nn.Sequential; "
            f"candidates: {listing}"
        )
    count = sum(p.numel() for p in chosen.parameters())
    return [LayerList(name=layers, num_layers=len(chosen), num_parameters=count)]


def along_layers(module: nn.Module, step_name: str, layers: str, run: Callable[[str], _T]) -> _T:
    """``run(name)`` for the first list of layers that the step calls once each and in order.

    Raises:
        ConfigurationError: there is no list, or none of that name.
        UnsupportedModuleError: ``run`` has raised NotTheLayersError for each; the message has the reasons.
    """
    reasons = []
    for candidate in candidate_layer_lists(module, layers):
        try:
            return run(candidate.name)
        except NotTheLayersError as reason:
            reasons.append(f"{candidate.describe()}: {reason}")
    raise UnsupportedModuleError(
        f"{type(module).__name__}.{step_name} calls no list of layers once each and in order, so there is "
        f"nothing to split a pipeline along. Tried {'; '.join(reasons)}. Name another list by layers=, or use "
        f"pipeline_parallel_size=1"
    )


class NotTheLayersError(Exception):
    """The step does not call the chosen list of layers once each and in order; another candidate may fit."""


class LayerCalls:
    """Gates in the layers of a copy of a module, which is thrown away afterwards: they follow a step from layer to layer.

    Args:
        layers: the name of the list.
        around: ``(index, forward, args, kwargs)``; runs a layer and returns its output.
    """

    def __init__(
        self,
        shadow: nn.Module,
        layers: str,
        around: Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self.names, self.layers = [], []  # type: list[str], list[nn.Module]
        places: dict[nn.Module, list[int]] = {}
        for name, layer in registered_modules(shadow.get_submodule(layers)).items():
            if layer is not None:
                places.setdefault(layer, []).append(len(self.layers))
                self.names.append(name)
                self.layers.append(layer)
        self._called: list[int] = []
        self._is_inside = self._has_ended = False
        self._around, self._places = around, places

    def begin(self) -> None:
        """A step begins; before the first one the gates are put in place."""
        for layer, indices in self._places.items():
            layer.forward = self._gate(indices, layer.forward)
        self._places.clear()
        self._called.clear()
        self._is_inside = self._has_ended = False

    def end(self) -> None:
        """The step has ended: from now on layers run as if there were no gates, in a backward that recomputes them.

        Raises:
            NotTheLayersError: it has left out layers.
        """
        self._has_ended = True
        if len(self._called) < len(self.layers):
            self._refuse()

    def _gate(self, places: list[int], forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(*args: Any, **kwargs: Any) -> Any:
            if self._has_ended:
                return forward(*args, **kwargs)
            index = len(self._called)
            outer = self._called[-1] if self._is_inside else None
            self._called.append(index if index in places else places[0])
            if self._called[-1] != index:
                self._refuse()
            if outer is not None:
                raise NotTheLayersError(f"layer {index} is called inside layer {outer}")
            self._is_inside = True
            output = self._around(index, forward, args, kwargs)
            self._is_inside = False
            return output

        return gate

    def _refuse(self) -> None:
        called = self._called
        if not called:
            raise NotTheLayersError("the step never calls them")
        for place, index in enumerate(called):
            if index in called[:place]:
                raise NotTheLayersError(f"the step passes through layer {index} twice")
        missing = sorted(set(range(len(self.layers))) - set(called))
        if called != sorted(called):
            raise NotTheLayersError(f"the step calls them in the order {called[:8]}")
        if called != list(range(len(called))):
            raise NotTheLayersError(f"the step skips layer {missing[0]}")
        raise NotTheLayersError(f"the step never calls layer {missing[0]}")
