"""Gradient buffers: changes of p.grad by autograd and zero_grad must not disturb the gradients that a window gathers."""

import pytest
import torch
from torch import nn

from lightning_holmes.comm.queue import make_comm_queue
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
        buffer.assign_grads(last=batch == batches - 1)
    return module, buffer, plain


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_of_a_window_equal_plain_accumulation(flat: bool, batches: int) -> None:
    module, _, plain = gathered(torch.float32, flat, batches)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_bf16_parameters_gather_in_fp32() -> None:
    module, buffer, plain = gathered(torch.bfloat16, True, 2)
    assert buffer.buckets[0].buffer.dtype == torch.float32
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
    buffer.assign_grads(last=True)
    torch.testing.assert_close(module.weight.grad, first)


@pytest.mark.parametrize("flat", [True, False])
def test_parameters_that_nothing_reached_keep_no_gradient(flat: bool) -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    buffer = GradBuffer(dict(module.named_parameters()), flat=flat)
    buffer.begin()
    module["used"](torch.ones(1, 2)).sum().backward()
    buffer.end()
    sync = GradSync(buffer, None, None, make_comm_queue(torch.device("cpu")))
    sync.start_grad_sync()
    sync.finish_grad_sync()
    buffer.assign_grads(last=True)
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
        buffer.assign_grads(last=True)
        assert (module[0].weight.grad is not None) == thawed


def test_thawing_does_not_bring_back_what_only_an_earlier_window_reached() -> None:
    """AdamW would decay a parameter that has a gradient of zeros, and plain Lightning does not change it."""
    module = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("always", "once", "thawed")})
    module["thawed"].requires_grad_(False)
    buffer = GradBuffer(dict(module.named_parameters()), flat=True)
    for window, names in enumerate((("always", "once"), ("always", "thawed"))):
        module["thawed"].requires_grad_(window == 1)
        buffer.begin()
        sum(module[name](torch.ones(1, 2)).sum() for name in names).backward()
        buffer.end()
        buffer.seal()
        buffer.assign_grads(last=True)
        assert {name for name in module if module[name].weight.grad is not None} == set(names)


def test_buckets_follow_the_given_order_and_are_padded() -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    names = [name for name, _ in module.named_parameters()][::-1]
    module[1].to(torch.float64)
    parameters = dict(module.named_parameters())
    buffer = GradBuffer(
        {n: parameters[n] for n in names},
        flat=True,
        data_parallel_size=8,
        bucket_bytes=60,
        apart={"3.bias": (0, 1)},
    )
    buffer.begin()
    assert [bucket.names for bucket in buffer.buckets] == [
        ("3.weight", "2.bias"),
        ("1.bias",),
        ("1.weight",),
        ("2.weight", "0.bias"),
        ("0.weight",),
        ("3.bias",),
    ]
    assert [bucket.apart for bucket in buffer.buckets] == [None] * 5 + [(0, 1)]
    for bucket in buffer.buckets:
        assert bucket.buffer.numel() % 8 == 0 and bucket.buffer.numel() - 8 < sum(
            parameters[n].numel() for n in bucket.names
        )
        for name in bucket.names:
            start = bucket.starts[name]
            assert bucket.views[name].data_ptr() == bucket.buffer[start:].data_ptr()
            assert bucket.buffer.dtype == parameters[name].dtype and bucket.views[name].shape == parameters[name].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_behind_the_launch_is_kept_aside(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1, bias=False, dtype=dtype)
    buffer = GradBuffer(dict(module.named_parameters()), flat=True)
    buffer.begin()
    module(torch.ones(1, 2, dtype=dtype)).sum().backward()
    (bucket,) = buffer.buckets
    buffer.launch(bucket)
    before = bucket.buffer.clone()
    module(torch.full((1, 2), 3.0, dtype=dtype)).sum().backward()
    assert torch.equal(bucket.buffer, before)
    assert buffer.late["weight"].tolist() == [[3.0, 3.0]]


def test_the_type_of_the_buckets() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, dtype=torch.float16)})
    module["c"] = nn.Linear(2, 2, dtype=torch.float64)
    buffer = GradBuffer(dict(module.named_parameters()), flat=True)
    buffer.begin()
    found = {name[0]: bucket.buffer.dtype for bucket in buffer.buckets for name in bucket.names}
    assert found == {"a": torch.float32, "b": torch.float32, "c": torch.float64}


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_that_autograd_did_not_accumulate(flat: bool) -> None:
    module = nn.Linear(3, 2)
    buffer = GradBuffer(dict(module.named_parameters()), flat=flat)
    buffer.begin()
    names, parameters = zip(*module.named_parameters(), strict=True)
    for _ in range(2):
        for name, gradient in zip(names, torch.autograd.grad(module(torch.ones(1, 3)).sum(), parameters), strict=True):
            buffer.add(name, gradient)
    buffer.end()
    buffer.seal()
    buffer.assign_grads(last=True)
    assert module.weight.grad.tolist() == [[2.0] * 3] * 2 and module.bias.grad.tolist() == [2.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_between_batches_is_the_users_own(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1, bias=False, dtype=dtype)
    buffer = GradBuffer(dict(module.named_parameters()), flat=True)
    buffer.begin()
    module(torch.ones(1, 2, dtype=dtype)).sum().backward()
    buffer.launch(buffer.buckets[0])
    buffer.end()
    module(torch.full((1, 2), 3.0, dtype=dtype)).sum().backward()
    assert module.weight.grad.tolist() == [[3.0, 3.0]] and not buffer.late
    assert buffer.buckets[0].buffer.tolist() == [1.0, 1.0]
