"""Finding the layer list of a module: the nn.ModuleList or nn.Sequential that a pipeline is split along.

This module only looks at lists and names; trace.py checks whether a step calls the layers once and in order.
"""

from dataclasses import dataclass

from torch import nn

from lightning_holmes.errors import ConfigurationError


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
