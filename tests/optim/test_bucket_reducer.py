"""One rank's BucketReducer where a fit would not show it: what windows add up, and when buckets are reduced."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups_alone import ALONE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.plan.placement import Placement

ALONE_WITH_A_TWIN = dataclasses.replace(ALONE, gradients=SimpleNamespace(host="replicas"))  # type: ignore[arg-type]


class NotedQueue:
    """A queue that runs everything at once."""

    def start(self, function: Callable[[], None], name: str | None = None, *, of: str = "") -> "NotedQueue":
        function()
        return self

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Twins:
    """A collective that acts as if there were a second replica with the same gradients."""

    name = "twins"

    def __init__(self) -> None:
        self.reducer: BucketReducer
        self.order: list[tuple[str, ...]] = []

    def sum(self, tensor: Tensor) -> None:
        self.order += [unit.names for unit in self.reducer.units if unit.gradient is tensor]
        tensor.mul_(2)

    scatter = gather = sum


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))


def alone(parameters: Mapping[str, nn.Parameter], **options: Any) -> BucketReducer:
    """Return the reducer of a rank without other replicas."""
    defaults: dict[str, Any] = {"groups": ALONE, "collective": None, "stages": (0,), "stages_of": {}, "shared": {}}
    options = defaults | {"placement": Placement(((0,),)), "queue": NotedQueue()} | options
    return BucketReducer(parameters, options.pop("groups"), options.pop("placement"), **options)


def made(module: nn.Module) -> tuple[BucketReducer, Twins]:
    """Return a reducer with a bucket for each parameter, and the collective that it uses."""
    parameters, twins = dict([*module.named_parameters()][::-1]), Twins()
    options = {"groups": ALONE_WITH_A_TWIN, "placement": Placement(((0, 1),)), "bucket_bytes": 1}
    twins.reducer = alone(parameters, collective=twins, **options)
    return twins.reducer, twins


def run(reducer: BucketReducer, losses: Sequence[Callable[[], Tensor]], *, last: bool = True) -> None:
    """Run a batch of a stage, with a backward for each loss."""
    reducer.begin(last=last)
    for place, loss in enumerate(losses):
        reducer.backward(0, first=place == 0, last=place == len(losses) - 1)
        loss().backward()
    reducer.backward_ended(0)
    reducer.reduce(0)
    reducer.end()
    assert all(p.grad is None for p in reducer.parameters.values())
    reducer.finish(last=last)
    reducer.show(reducer.reached())


def test_bf16_gradients_of_a_window_are_added_and_rounded_in_fp32() -> None:
    module = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    reducer, parts = alone(dict(module.named_parameters())), (256.0, 1.0, 1.0)  # 256 + 1 is 256 in bf16
    for window in range(2):
        for number, part in enumerate(parts):
            run(reducer, [lambda part=part: part * module(torch.ones(1, 3).bfloat16()).sum()], last=number == 2)  # type: ignore[misc]
            assert module.weight.grad.dtype == torch.bfloat16
        assert module.weight.grad.tolist() == [[258.0] * 3], window


@pytest.mark.parametrize("before", [0, 1])
def test_a_parameter_that_is_thawed_in_a_batch_is_refused(before: int) -> None:
    module = nn.Linear(2, 2)
    reducer = alone(dict(module.named_parameters()))
    for _ in range(before):
        run(reducer, [lambda: module(torch.ones(1, 2)).sum()])
    module.bias.requires_grad_(False)

    def loss() -> Tensor:
        module.bias.requires_grad_(True)
        return module(torch.ones(1, 2)).sum()

    with pytest.raises(UnsupportedModuleError, match="bias was frozen when the batch began"):
        run(reducer, [loss])


def test_thawing_does_not_bring_back_what_only_an_earlier_window_reached() -> None:
    """AdamW would decay a parameter that has a gradient of zeros, and plain Lightning does not change it."""
    module = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("always", "once", "thawed")})
    reducer = alone(dict(module.named_parameters()))
    for window, names in enumerate((("always", "once"), ("always", "thawed"))):
        module["thawed"].requires_grad_(window == 1)
        run(reducer, [lambda names=names: sum(module[name](torch.ones(1, 2)).sum() for name in names)])  # type: ignore[misc]
        assert {name for name in module if module[name].weight.grad is not None} == set(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_between_batches_is_the_users_own(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1, bias=False, dtype=dtype)
    reducer = alone(dict(module.named_parameters()))
    run(reducer, [lambda: module(torch.ones(1, 2, dtype=dtype)).sum()])
    module.zero_grad()
    module(torch.full((1, 2), 3.0, dtype=dtype)).sum().backward()
    assert module.weight.grad.tolist() == [[3.0, 3.0]]
    assert reducer.units[0].gradient.tolist() == [1.0, 1.0]  # type: ignore[union-attr]


def twice(loss: Callable[[], Tensor]) -> list[Callable[[], Tensor]]:
    return [loss, loss]


def test_buckets_start_in_the_last_backward_one_after_the_other() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    reducer, twins = made(module)
    at: list[int] = []
    module[1].weight.register_post_accumulate_grad_hook(lambda _: at.append(len(twins.order)))
    for _ in range(2):
        run(reducer, twice(lambda: module(torch.ones(1, 2)).sum()), last=False)
    assert twins.order == []
    run(reducer, twice(lambda: module(torch.ones(1, 2)).sum()))
    assert twins.order == [("2.weight",), ("1.weight",), ("0.weight",)]
    assert at[-1] == 1, "the bucket after was not on its way when the backward came here"
    plain = torch.autograd.grad(module(torch.ones(1, 2)).sum(), module[0].weight)[0]
    torch.testing.assert_close(module[0].weight.grad, 2 * 6 * plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_reached_twice_in_a_backward_is_summed_whole(dtype: torch.dtype) -> None:
    """Reentrant checkpointing of two segments with the same module: autograd accumulates twice."""
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "shared": nn.Linear(2, 2)}).to(dtype)
    plain = copy.deepcopy(module)

    def loss(module: nn.ModuleDict) -> Tensor:
        hidden = module["first"](torch.ones(1, 2, dtype=dtype))
        for _ in range(2):
            hidden = checkpoint(module["shared"], hidden, use_reentrant=True).tanh()
        return hidden.sum()

    for _ in range(2):
        loss(plain).backward()
    reducer, _ = made(module)
    for _ in range(2):
        run(reducer, twice(lambda: loss(module)))
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, 2 * theirs.grad)
    assert not reducer.overlaps, "from then on everything waits for the end"
