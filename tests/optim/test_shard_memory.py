"""Parameter gathers in flight: each reader waits for the parameters that it reads, and for no others. One process;
the test runs the queue."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.optim.arriving import ArrivingParameter, can_gather_lazily
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.unit import side_by_side


class HeldLane:
    """A lane that runs a transfer when it is waited for."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.started = 0

    def start(self, function: Callable[[], None], name: str | None = None, *, of: str = "") -> Any:
        number, self.started = self.started, self.started + 1
        queue = self

        class Work:
            def wait(self) -> None:
                function()
                queue.done.append(number)

        return Work()

    def close(self) -> None:
        pass


class Custom(nn.Module):
    """A user's module whose forward hides its parameter from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: type | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = type(self.weight)
        return x


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Sequential, ReplicatedMemory, HeldLane]:
    """Return a linear layer in bucket 1, another in bucket 0, and a custom module in bucket 2; all values become 7
    when they arrive."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Custom())
    parameters = dict(module.named_parameters())
    units = [
        side_by_side({name: parameters[name] for name in names}, multiple_of=4)
        for names in (("1.weight", "1.bias"), ("0.weight", "0.bias"), ("2.weight",))
    ]
    queue, collective = HeldLane(), SimpleNamespace(gather=lambda tensor: tensor.fill_(7.0))
    reducer: Any = SimpleNamespace(parameters=parameters, units=units, queue=queue, collective=collective)
    memory = ReplicatedMemory(reducer, object(), lazily=True)  # type: ignore[arg-type]
    memory.lay_out(by_elements=True)
    memory.watch(module)
    return module, memory, queue


READERS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "data": lambda layer: layer.weight.data,
    "norm": lambda layer: layer.weight.norm(),
    "list": lambda layer: torch._foreach_norm([layer.weight]),
    "out": lambda layer: torch.zeros(3, 3).copy_(layer.weight),
    "state_dict": lambda layer: layer.state_dict(),
    "deepcopy": lambda layer: copy.deepcopy(layer.weight),
    "pickle": lambda layer: pickle.dumps(layer.weight),
    "write": lambda layer: nn.init.zeros_(layer.weight),
    "numpy": lambda layer: layer.weight.detach().numpy(),
    "pointer": lambda layer: layer.weight.data_ptr(),
    "print": lambda layer: repr(layer.weight),
}


@pytest.mark.parametrize("reader", list(READERS))
def test_a_reader_waits_for_its_bucket_only(made: Any, reader: str) -> None:
    module, memory, queue = made
    memory.start()
    assert queue.started == 3 and not queue.done
    READERS[reader](module[0])
    assert queue.done == [1] and type(module[0].weight) is nn.Parameter
    assert type(module[1].weight) is not nn.Parameter and isinstance(module[1].weight, nn.Parameter)
    if reader != "write":
        assert torch.equal(module[0].weight.detach(), torch.full((3, 3), 7.0))
    memory.finish()
    assert sorted(queue.done) == [0, 1, 2] and all(type(p) is nn.Parameter for p in module.parameters())


def test_what_reads_no_value_does_not_wait(made: Any) -> None:
    module, memory, queue = made
    memory.start()
    weight = module[0].weight
    weight.grad = torch.zeros(3, 3)
    assert weight.shape == (3, 3) and weight.dtype == torch.float32 and weight.requires_grad and weight.numel() == 9
    assert weight.grad is not None and weight in {weight} and weight.is_leaf
    module.zero_grad()
    assert not queue.done


def test_a_module_of_the_users_waits_before_it_runs(made: Any) -> None:
    module, memory, queue = made
    memory.start()
    module[2](torch.ones(1))
    assert module[2].seen is nn.Parameter and queue.done == [0]  # the forward reads the last bucket first


def test_replaced_data_is_taken_over_and_memory_is_given_back(made: Any) -> None:
    module, memory, _ = made
    module[0].weight.data = torch.full((3, 3), 5.0)
    memory.adopt()
    assert torch.equal(memory.units[1].values[:9], torch.full((9,), 5.0))
    memory.close()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


def test_a_failed_run_waits_for_nothing(made: Any) -> None:
    module, memory, queue = made
    memory.start()
    memory.abandon()
    assert not queue.done and all(type(p) is nn.Parameter for p in module.parameters())


def test_after_a_transfer_has_failed_parameters_are_ordinary_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("lost")

    module, memory, queue = made
    monkeypatch.setattr(queue, "start", lambda *_, **__: SimpleNamespace(wait=fail))
    memory.start()
    with pytest.raises(RuntimeError, match="lost"):
        memory.finish()
    memory.abandon()
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_compiled_modules_are_not_gathered_lazily() -> None:
    assert can_gather_lazily(nn.Sequential(nn.Linear(2, 2)))
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert not can_gather_lazily(nn.Sequential(compiled))
    assert not can_gather_lazily(nn.Sequential(torch.compile(nn.Linear(2, 2))))  # type: ignore[arg-type]
    assert not can_gather_lazily(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    assert ArrivingParameter.__name__ == "Parameter"
