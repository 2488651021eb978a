"""What a snapshot holds of a module and its optimizers besides their states."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.switches import Switches


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    return module, torch.optim.SGD(module[2].parameters(), lr=0.1)


def switches_of(module: nn.Module, loaded_state: LoadedState) -> Switches:
    pipeline: Any = SimpleNamespace(module=module, parameters=dict(module.named_parameters()))
    return Switches(lambda: pipeline, loaded_state)


def test_what_hooks_have_switched_and_added_is_put_back() -> None:
    """A group that a hook has meanwhile added again is not added twice, and gets the saved learning rate."""
    module, _ = build()
    module[0].requires_grad_()
    module[2].bias.requires_grad_(False)
    module[2].eval()
    module[1].track_running_stats = False
    saved = switches_of(module, LoadedState()).read()
    groups = [
        {"params": list(names), "lr": lr}
        for names, lr in ((("2.weight", "2.bias"), 0.1), (("0.weight", "0.bias"), 0.02))
    ]
    for again in (False, True):
        other, optimizer = build()
        loaded_state = LoadedState()
        loaded_state.hold_optimizers([optimizer], [{"state": {}, "param_groups": groups}])
        if again:
            optimizer.add_param_group({"params": list(other[0].parameters()), "lr": 0.5})
        switches = switches_of(other, loaded_state)
        switches.put(saved)
        assert switches.read() == saved
        assert other[1].track_running_stats is False and other[0].training and not other[2].training
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
        assert list(map(id, optimizer.param_groups[1]["params"])) == list(map(id, other[0].parameters()))
