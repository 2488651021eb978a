"""Gradient buffers: what autograd and zero_grad do to p.grad must not disturb what a window gathers."""

import pytest
import torch
from torch import nn

from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.grad_sync import GradSync


def gathered(dtype: torch.dtype, flat: bool, batches: int) -> tuple[nn.Linear, GradBuffer, nn.Linear]:
    torch.manual_seed(0)
    module, plain = nn.Linear(3, 2, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    buffer = GradBuffer(dict(module.named_parameters()), flat=flat)
    for batch in range(batches):
        x = torch.full((4, 3), batch + 1.0, dtype=dtype)
        buffer.begin()
        for part in x.split(2):
            (module(part).square().sum()).backward()
            (plain(part).square().sum()).backward()
        buffer.end()
        assert all(p.grad is None for p in module.parameters())
        module.zero_grad(set_to_none=False)
        buffer.seal()
        buffer.expose(last=batch == batches - 1)
    return module, buffer, plain


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_of_a_window_equal_plain_accumulation(flat: bool, batches: int) -> None:
    module, _, plain = gathered(torch.float32, flat, batches)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_bf16_parameters_gather_in_fp32() -> None:
    module, buffer, plain = gathered(torch.bfloat16, True, 2)
    assert buffer.buffers[0].dtype == torch.float32
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
        torch.testing.assert_close(mine.grad.float(), theirs.grad.float(), rtol=2e-2, atol=1e-2)


def test_a_new_window_starts_from_zero() -> None:
    module, buffer, _ = gathered(torch.float32, True, 1)
    first = module.weight.grad.clone()
    module.zero_grad()
    buffer.begin()
    for part in torch.ones(4, 3).split(2):
        module(part).square().sum().backward()
    buffer.end()
    buffer.seal()
    buffer.expose(last=True)
    torch.testing.assert_close(module.weight.grad, first)


@pytest.mark.parametrize("flat", [True, False])
def test_parameters_that_nothing_reached_keep_no_gradient(flat: bool) -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    buffer = GradBuffer(dict(module.named_parameters()), flat=flat)
    buffer.begin()
    module["used"](torch.ones(1, 2)).sum().backward()
    buffer.end()
    sync = GradSync(buffer, None)
    sync.start_grad_sync()
    sync.finish_grad_sync()
    buffer.expose(last=True)
    assert module["unused"].weight.grad is None and module["used"].weight.grad is not None


def test_thawing_a_parameter_builds_the_buffer_anew() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    buffer = GradBuffer(dict(module.named_parameters()), flat=True)
    for thawed in (False, True):
        module[0].requires_grad_(thawed)
        buffer.begin()
        module(torch.ones(1, 2)).sum().backward()
        buffer.end()
        buffer.seal()
        buffer.expose(last=True)
        assert (module[0].weight.grad is not None) == thawed
