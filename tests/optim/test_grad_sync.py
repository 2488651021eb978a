"""When buckets are reduced, and in which order; with a queue and a collective that only record calls."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_holmes.comm.mesh import SharedGroup
from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.grad_sync import GradSync


class NotedLane:
    """A lane that runs transfers at once."""

    def start(self, function: Callable[[], None], name: str | None = None, of: str = "") -> "NotedLane":
        function()
        return self

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Twins:
    """A collective that acts as if there were a second replica with the same gradients."""

    name = "twins"

    def __init__(self, buffer: GradBuffer) -> None:
        self.buffer = buffer
        self.order: list[tuple[str, ...]] = []

    def sum(self, tensor: Tensor) -> None:
        self.order += [b.names for b in self.buffer.buckets if b.buffer is tensor]
        tensor.mul_(2)

    scatter = gather = sum


def times(tensor: Tensor, factor: int) -> None:
    tensor.mul_(factor)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: times(tensor, 2))


def made(module: nn.Module, **options: Any) -> tuple[GradBuffer, GradSync, Twins]:
    parameters = dict([*module.named_parameters()][::-1])
    buffer = GradBuffer(parameters, flat=True, data_parallel_size=2, bucket_bytes=1, apart=options.pop("apart", None))
    twins = Twins(buffer)
    return buffer, GradSync(buffer, twins, object(), NotedLane(), **options), twins  # type: ignore[arg-type]


def run(buffer: GradBuffer, sync: GradSync, loss: Callable[[], Tensor], *, last: bool = True, parts: int = 2) -> None:
    buffer.begin()
    sync.open(last=last)
    for part in range(parts):
        if part == parts - 1:
            sync.last_backward(0)
        loss().backward()
    sync.backwards_done(0)
    buffer.end()
    if last:
        sync.start_grad_sync()
        sync.finish_grad_sync()
    buffer.assign_grads(last=last)


def test_buckets_start_in_the_last_backward_one_after_the_other() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    buffer, sync, twins = made(module)
    at: list[int] = []
    module[1].weight.register_post_accumulate_grad_hook(lambda _: at.append(len(twins.order)))
    for _ in range(2):
        run(buffer, sync, lambda: module(torch.ones(1, 2)).sum(), last=False)
    assert twins.order == []
    run(buffer, sync, lambda: module(torch.ones(1, 2)).sum())
    assert twins.order == [("2.weight",), ("1.weight",), ("0.weight",)]
    assert at[-1] == 1, "the bucket after was not on its way when the backward came here"
    plain = torch.autograd.grad(module(torch.ones(1, 2)).sum(), module[0].weight)[0]
    torch.testing.assert_close(module[0].weight.grad, 2 * 6 * plain)


def test_what_the_last_backward_does_not_reach_holds_up_the_order_until_its_end() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["c"] = nn.Linear(2, 2, bias=False)
    buffer, sync, twins = made(module)
    run(buffer, sync, lambda: module["a"](module["c"](torch.ones(1, 2))).sum())
    assert twins.order == [("c.weight",), ("b.weight",), ("a.weight",)]
    assert module["b"].weight.grad is None and module["a"].weight.grad is not None


def test_several_stages_of_a_rank_must_all_have_passed() -> None:
    module = nn.Linear(2, 2, bias=False)
    buffer, sync, twins = made(module, stages_of={"weight": {0, 2}}, stages=(0, 2))
    buffer.begin()
    sync.open(last=True)
    for stage in (2, 0):
        assert twins.order == []
        sync.last_backward(stage)
        module(torch.ones(1, 2)).sum().backward()
        sync.backwards_done(stage)
    assert twins.order == [("weight",)]


def test_what_stages_share_is_summed_over_them_first_and_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    over: list[Any] = []
    buffer, sync, twins = made(
        module, apart={"1.weight": (0, 1)}, shared_groups={(0, 1): SharedGroup("stages", "stages")}
    )
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, **_: over.append(group) or times(tensor, 3))
    run(buffer, sync, lambda: module(torch.ones(1, 2)).sum(), parts=1)
    assert twins.order == [("0.weight",), ("1.weight",)]
    assert over[:2] == ["stages", "stages"] and len(over) == 3
    plain = torch.autograd.grad(module(torch.ones(1, 2)).sum(), module[1].weight)[0]
    torch.testing.assert_close(module[1].weight.grad, 2 * 3 * plain)


def test_a_parameter_that_is_reached_twice_in_a_backward_is_summed_whole() -> None:
    """Reentrant checkpointing of two segments with the same module: autograd accumulates twice."""
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "shared": nn.Linear(2, 2)})

    plain = copy.deepcopy(module)

    def loss(module: nn.ModuleDict) -> Tensor:
        hidden = module["first"](torch.ones(1, 2))
        for _ in range(2):
            hidden = checkpoint(module["shared"], hidden, use_reentrant=True).tanh()
        return hidden.sum()

    for _ in range(2):
        loss(plain).backward()
    buffer, sync, _ = made(module)
    for _ in range(2):
        run(buffer, sync, lambda: loss(module))
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, 2 * theirs.grad)
    assert not sync.overlaps, "from then on everything waits for the end"
    assert not buffer.is_late
