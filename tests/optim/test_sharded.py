"""A sharded optimizer gives the numbers of the unsharded one. Baseline: a plain loop.
Tolerance 1e-5 relative (fp32)."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from groups_alone import ALONE
from launch import launch
from torch import Tensor, nn

from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.elementwise import Separability, find_separability
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.shard_states import MASTER_WEIGHT
from lightning_holmes.optim.sharded_host import ShardedHost, ShardedStep
from lightning_holmes.plan.placement import Placement

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
                    self.update(p, group["lr"])

    def update(self, p: Any, lr: float) -> None:
        state = self.state[p]
        state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
        state["count"] = state.get("count", 0) + 1
        p.sub_(state["mean"] * (lr * p.norm() / (state["mean"].norm() + 1e-6)))


class Marked(Lamb):
    """Reads a learning rate that is stored as an attribute of each parameter."""

    def update(self, p: Any, lr: float) -> None:
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


class Replicas:
    """A collective of the four replicas; parts that a scatter leaves undefined become NaN."""

    name = "all_reduce"

    def sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def scatter(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        for other, part in enumerate(tensor.chunk(4)):
            if other != dist.get_rank():
                part.fill_(float("nan"))

    def gather(self, tensor: Tensor) -> None:
        dist.all_gather(list(tensor.chunk(4)), tensor.chunk(4)[dist.get_rank()].clone())


def run_window(reducer: BucketReducer, shards: ShardedHost, step: int) -> None:
    """Reduce this rank's gradients of a step, and give them to the sharded optimizer."""
    reducer.begin(last=True)
    reducer.backward(0, first=True, last=True)
    for name, parameter in reducer.parameters.items():
        mine = gradient(step, name, dist.get_rank(), parameter)
        if mine is not None:
            (parameter * mine.to(parameter.dtype)).sum().backward()
    reducer.reduce(0)
    reducer.end()
    reducer.finish(last=True)
    shards.take_gradients(last=True)


def divide(
    module: nn.Module, optimizer: Any, found: Separability, parameters: dict[str, nn.Parameter], **options: bool
) -> tuple[BucketReducer, ShardedHost]:
    """Shard ``optimizer`` over four replicas, with buckets that have the parameters in this order."""
    names = {id(p): n for n, p in module.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    world = dist.group.WORLD
    alone = dataclasses.replace(ALONE, gradients=SimpleNamespace(host=world), data_parallel=world)  # type: ignore[arg-type]
    reducer = BucketReducer(
        parameters,
        alone,
        Placement(((0, 1, 2, 3),)),
        stages=(0,),
        stages_of={},
        shared={},
        queue=make_comm_queue(torch.device("cpu")),
        collective=Replicas(),
        bucket_bytes=200,
    )
    reducer.lay_out()
    memory = ReplicatedMemory(reducer, world, lazily=True)
    step = ShardedStep(optimizer=optimizer, names=groups, found=found, **options)
    shards = ShardedHost(step, memory, reducer, alone, is_owner=lambda name: True, scaler=None, place="")
    return reducer, shards


def compare(name: str, make: Any, level: str, *, whole: bool) -> None:
    torch.manual_seed(1)
    module = Net()
    reference = copy.deepcopy(module)
    plain, optimizer = make(reference), make(module)
    found = find_separability(optimizer, torch.device("cpu"))
    assert found.level == level, (name, found)
    parameters = dict(reversed(list(module.named_parameters())))
    reducer, shards = divide(module, optimizer, found, parameters, whole_gradients=whole)
    shards._memory.watch(module)
    held = list(optimizer.param_groups)
    for step in range(STEPS):
        for net in (module, reference):  # frozen for a while
            net.second.weight.requires_grad_(step not in (2, 3))
        run_window(reducer, shards, step)
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
    states = dict(shards.each_state())
    expected = {n: plain.state[p] for n, p in reference.named_parameters() if plain.state.get(p)}
    assert states.keys() == expected.keys(), name
    for parameter_name, state in expected.items():
        torch.testing.assert_close(states[parameter_name], dict(state), rtol=1e-5, atol=1e-6)
    mine = dict(shards.each_state(shards.destination))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, sorted(mine))
    assert sorted(n for part in everyone for n in part) == sorted(expected), "each state on one rank"
    shards.close()
    reducer.close()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


def compare_masters(make: Any, *, whole: bool) -> None:
    """Compare bf16 parameters with fp32 masters against a plain loop that steps fp32 weights and rounds them."""
    torch.manual_seed(1)
    module = Net().bfloat16()
    reference = copy.deepcopy(module).float()
    plain, optimizer = make(reference), make(module)
    found = find_separability(optimizer, torch.device("cpu"))
    parameters = dict(module.named_parameters())
    reducer, shards = divide(module, optimizer, found, parameters, whole_gradients=whole, master_weights=True)
    for step in range(STEPS):
        if step == 3:  # user code writes to the parameters
            module.first.weight.data.mul_(0.3)
            reference.first.weight.data.copy_(module.first.weight.data)
        run_window(reducer, shards, step)
        if step == 4:  # hooks between backward and step change a gradient, and another parameter
            if whole:
                module.third.bias.grad = torch.full((7,), 0.5, dtype=torch.bfloat16)
            module.second.weight.data.fill_(0.25)
            reference.second.weight.data.fill_(0.25)
        shards.absorb()
        shards.adopt_values()
        for (name, ours), parameter in zip(module.named_parameters(), reference.parameters(), strict=True):
            parameter.grad = summed(step, name, ours)
        if whole and step == 4:
            reference.third.bias.grad = torch.full((7,), 0.5)
        plain.step()
        optimizer.step()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().float(), theirs.detach(), rtol=1e-2, atol=1e-6)
    states = dict(shards.each_state())
    assert states.keys() >= parameters.keys() - {"never"}
    for name, state in states.items():
        master = state[MASTER_WEIGHT]
        torch.testing.assert_close(master, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
        # only a parameter that was never stepped still has its rounded value
        assert torch.equal(master, master.bfloat16().float()) == (name == "never") or master.numel() < 2
    shards.close()
    reducer.close()


def run_all(payload: Any) -> list[str]:
    dist.init_process_group("gloo")
    done = []
    for name, (level, make) in OPTIMIZERS.items():
        for whole in (False, True):
            compare(name, make, level, whole=whole)
            done.append(name)
        if name in ("adamw", "adafactor", "sgd_without_states"):
            for whole in (False, True):
                compare_masters(make, whole=whole)
    return done


def test_four_replicas_give_the_numbers_of_a_plain_loop() -> None:
    for done in launch(4, "test_sharded:run_all", timeout_s=120):
        assert set(done) == set(OPTIMIZERS)
