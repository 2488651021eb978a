"""Four replicas step a small module with a sharded optimizer, and each also runs a plain loop that steps all of it:
same gradients, same numbers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm.queue import CommQueue, make_comm_queue
from lightning_holmes.optim.elementwise import Separability, test_separability
from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.shard_states import MASTER_WEIGHT
from lightning_holmes.optim.sharded import ShardedOptimizer

STEPS = 6


class Net(nn.Module):
    """Matrices of 7 x 5 and biases, a parameter that is not always used, one that is never used, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7)
        self.rare = nn.Parameter(torch.randn(9))
        self.never = nn.Parameter(torch.randn(3))
        self.number = nn.Parameter(torch.randn(()))


class Lamb(torch.optim.Optimizer):
    """An optimizer whose step of a parameter depends on that parameter's norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
                    state["count"] = state.get("count", 0) + 1
                    p.sub_(state["mean"] * (group["lr"] * p.norm() / (state["mean"].norm() + 1e-6)))


class Marked(torch.optim.Optimizer):
    """Reads a learning rate that is stored as an attribute of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.own_rate * p.grad)


class Derived(torch.optim.SGD):
    """Runs the step of its base class, for which torch calls hooks, too, and then does more."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.01 * p.grad.sign())


def marked(module: nn.Module) -> torch.optim.Optimizer:
    for number, parameter in enumerate(module.parameters()):
        parameter.own_rate = 0.1 + 0.01 * number  # type: ignore[attr-defined]
    return Marked(module.parameters())


def two_groups(cls: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        decayed = [p for n, p in named if p.ndim == 2]
        return cls(
            [{"params": decayed, "weight_decay": 0.1}, {"params": [p for n, p in named if p.ndim != 2]}], **options
        )

    return make


def matrices(cls: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda module: cls([p for p in module.parameters() if p.ndim == 2], **options)


OPTIMIZERS: dict[str, tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "adamw": ("elements", two_groups(torch.optim.AdamW, lr=0.05)),
    "adamw_fused": ("elements", two_groups(torch.optim.AdamW, lr=0.05, fused=True)),
    "adamw_amsgrad_foreach": ("elements", two_groups(torch.optim.AdamW, lr=0.05, foreach=True, amsgrad=True)),
    "sgd": ("elements", two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd_without_states": ("elements", two_groups(torch.optim.SGD, lr=0.1)),
    "marked": ("elements", marked),
    "derived": ("elements", two_groups(Derived, lr=0.1, momentum=0.9)),
    "rmsprop": ("elements", two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)),
    "asgd": ("elements", two_groups(torch.optim.ASGD, lr=0.05)),
    "muon": ("parameters", matrices(torch.optim.Muon, lr=0.05)),
    "adafactor": ("parameters", two_groups(torch.optim.Adafactor, lr=0.05)),
    "lamb": ("parameters", lambda module: Lamb(module.parameters())),
}


def gradient(step: int, name: str, rank: int, parameter: Tensor) -> Tensor | None:
    """Return the gradient that a rank's backward gives."""
    if name == "never" or (name == "rare" and (step % 3 or rank != 2)) or not parameter.requires_grad:
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + sum(map(ord, name)))
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def summed(step: int, name: str, parameter: Tensor) -> Tensor | None:
    parts = [g for rank in range(4) if (g := gradient(step, name, rank, parameter)) is not None]
    return sum(p.float() for p in parts) if parts else None  # type: ignore[return-value]


def gather_into(buffer: GradBuffer, step: int, rank: int, *, shares: bool) -> frozenset[str]:
    """Run a window: this rank's gradients go into the buckets and are reduced; return the names of the parameters
    that have gradients."""
    buffer.begin()
    for name, parameter in buffer.parameters.items():
        mine = gradient(step, name, rank, parameter)
        if mine is not None:
            (parameter * mine.to(parameter.dtype)).sum().backward()  # so that the buffer's hooks run
    buffer.end()
    buffer.seal()
    dist.all_reduce(buffer.flags)
    for bucket in buffer.buckets:
        dist.all_reduce(bucket.buffer)
        if shares:
            for other, part in enumerate(bucket.buffer.chunk(4)):
                if other != rank:
                    part.fill_(float("nan"))
    buffer.assign_grads(last=True)
    reached = frozenset(n for n, p in buffer.parameters.items() if p.grad is not None)
    for parameter in buffer.parameters.values() if shares else ():
        parameter.grad = None
    return reached


def gather_parts(tensor: Tensor) -> None:
    dist.all_gather(list(tensor.chunk(4)), tensor.chunk(4)[dist.get_rank()].clone())


def divide(
    module: nn.Module, optimizer: Any, found: Separability, parameters: dict[str, nn.Parameter], **options: bool
) -> tuple[GradBuffer, CommQueue, ShardedOptimizer]:
    """Shard ``optimizer`` over four replicas, with a laid-out buffer that has the parameters in this order."""
    names = {id(p): n for n, p in module.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    buffer = GradBuffer(parameters, flat=True, data_parallel_size=4, bucket_bytes=200)
    buffer.begin()
    buffer.end()
    queue = make_comm_queue(torch.device("cpu"))
    world = dist.group.WORLD
    memory = ReplicatedMemory(buffer, world, queue, gather=gather_parts, lazily=True)
    shards = ShardedOptimizer(optimizer, groups, memory, found, replicas=world, **options)
    return buffer, queue, shards


def compare(name: str, make: Any, level: str, *, whole: bool, rank: int) -> None:
    torch.manual_seed(1)
    module = Net()
    reference = copy.deepcopy(module)
    plain, optimizer = make(reference), make(module)
    found = test_separability(optimizer, torch.device("cpu"))
    assert found.level == level, (name, found)
    parameters = dict(reversed(list(module.named_parameters())))
    buffer, queue, shards = divide(module, optimizer, found, parameters, whole_gradients=whole)
    shards.watch(module)
    held = list(optimizer.param_groups)
    for step in range(STEPS):
        for net in (module, reference):  # frozen for a while
            net.second.weight.requires_grad_(step not in (2, 3))
        buffer.begin()
        shards.prepare()
        reached = gather_into(buffer, step, rank, shares=not shards.whole_gradients)
        shards.take_gradients(reached)
        for parameter_name, parameter in reference.named_parameters():
            parameter.grad = summed(step, parameter_name, parameter)
        plain.step()
        optimizer.step()
        assert all(a is b for a, b in zip(held, optimizer.param_groups, strict=True))
        if step != STEPS - 1:
            assert any(type(p) is not nn.Parameter for p in module.parameters())
        for (parameter_name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} {step} {parameter_name}"
            )
            assert type(ours) is nn.Parameter
    states = shards.collect()
    expected = {n: plain.state[p] for n, p in reference.named_parameters() if plain.state.get(p)}
    assert states.keys() == expected.keys(), name
    for parameter_name, state in expected.items():
        torch.testing.assert_close(states[parameter_name], dict(state), rtol=1e-5, atol=1e-6)
    mine = shards.collect(shards.destination)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, sorted(mine))
    assert sorted(n for part in everyone for n in part) == sorted(expected), "each state on one rank"
    shards.close()
    queue.close()
    buffer.close()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


def compare_masters(make: Any, *, whole: bool, rank: int) -> None:
    """Compare bf16 parameters with fp32 masters against a plain loop that steps fp32 weights and rounds them."""
    torch.manual_seed(1)
    module = Net().bfloat16()
    reference = copy.deepcopy(module).float()
    plain, optimizer = make(reference), make(module)
    found = test_separability(optimizer, torch.device("cpu"))
    parameters = dict(module.named_parameters())
    buffer, queue, shards = divide(module, optimizer, found, parameters, whole_gradients=whole, master_weights=True)
    for step in range(STEPS):
        if step == 3:  # user code writes to the parameters
            module.first.weight.data.mul_(0.3)
            reference.first.weight.data.copy_(module.first.weight.data)
        buffer.begin()
        shards.prepare()
        shards.take_gradients(gather_into(buffer, step, rank, shares=not whole))
        if whole and step == 4:  # a hook changes a gradient
            module.third.bias.grad = torch.full((7,), 0.5, dtype=torch.bfloat16)
        shards.absorb()
        for (name, ours), parameter in zip(module.named_parameters(), reference.parameters(), strict=True):
            parameter.grad = summed(step, name, ours)
        if whole and step == 4:
            reference.third.bias.grad = torch.full((7,), 0.5)
        plain.step()
        optimizer.step()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().float(), theirs.detach(), rtol=1e-2, atol=1e-6)
    states = shards.collect()
    assert states.keys() >= parameters.keys() - {"never"}
    for name, state in states.items():
        master = state[MASTER_WEIGHT]
        torch.testing.assert_close(master, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
        # only a parameter that was never stepped still has its rounded value
        assert torch.equal(master, master.bfloat16().float()) == (name == "never") or master.numel() < 2
    shards.close()
    queue.close()


def run_all(payload: Any) -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = []
    for name, (level, make) in OPTIMIZERS.items():
        for whole in (False, True):
            compare(name, make, level, whole=whole, rank=dist.get_rank())
            done.append(name)
        if name in ("adamw", "adafactor", "sgd_without_states"):
            for whole in (False, True):
                compare_masters(make, whole=whole or level == "parameters", rank=dist.get_rank())
    return done
