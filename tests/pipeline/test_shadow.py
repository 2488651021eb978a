"""Shadow copies of a module: what they share with it, and what is their own."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_holmes.pipeline.shadow import shadow_copy

pytestmark = pytest.mark.versions


class Named(OrderedDict[str, Any]):
    """A container class of the user's own."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.seen: list[int] = []
        self.same = self.seen
        self.names, self.noted = Named(), OrderedDict[str, int]()
        self.noted.about = ["a list"]  # type: ignore[attr-defined]
        self.nested = {"losses": []}


def test_what_is_empty_is_copied_too_and_stays_one_where_it_was_one() -> None:
    module = Net()
    copied: Any = shadow_copy(module)
    assert copied.layers[0].weight is module.layers[0].weight
    copied.seen.append(1)
    copied.names["a"] = copied.noted["a"] = 1
    copied.noted.about.append("more")
    copied.nested["losses"].append(1)
    copied.layers[0].register_forward_hook(lambda *_: None)
    copied.layers[0].register_buffer("count", torch.zeros(1), persistent=False)
    assert copied.same is copied.seen and type(copied.names) is Named
    assert module.seen == [] and not module.names and not module.noted and module.nested == {"losses": []}
    assert module.noted.about == ["a list"]  # type: ignore[attr-defined]
    assert not module.layers[0]._forward_hooks and not module.layers[0]._non_persistent_buffers_set
    assert not copied.layers[1]._forward_hooks and len(copied.layers[0]._forward_hooks) == 1
