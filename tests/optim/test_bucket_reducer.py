"""One rank's BucketReducer: windows, buckets, and when they are reduced; with a queue and a collective that only record calls."""

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

from lightning_holmes.comm.mesh import SharedGroup
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim import reducer as reducers
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.reducer import LocalReducer
from lightning_holmes.plan.placement import Placement

ALONE_WITH_A_TWIN = dataclasses.replace(ALONE, gradients=SimpleNamespace(host="replicas"))  # type: ignore[arg-type]


class NotedQueue:
    """A queue that runs everything at once."""

    on_run = None

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


def times(tensor: Tensor, factor: int) -> None:
    tensor.mul_(factor)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: times(tensor, 2))
    monkeypatch.setattr(
        reducers, "join_shared", lambda *given: {ranks: SharedGroup("stages", "stages") for ranks in given[2]}
    )


def alone(parameters: Mapping[str, nn.Parameter], **options: Any) -> BucketReducer:
    """Return the reducer of a rank without other replicas."""
    defaults: dict[str, Any] = {"groups": ALONE, "collective": None, "stages": (0,), "stages_of": {}, "shared": {}}
    options = defaults | {"placement": Placement(((0,),)), "queue": NotedQueue()} | options
    return BucketReducer(parameters, options.pop("groups"), options.pop("placement"), **options)


def made(module: nn.Module, **options: Any) -> tuple[BucketReducer, Twins]:
    """Return a reducer with a bucket for each parameter, and the collective that it uses."""
    parameters, twins = dict([*module.named_parameters()][::-1]), Twins()
    options |= {"groups": ALONE_WITH_A_TWIN, "placement": Placement(((0, 1),)), "bucket_bytes": 1}
    twins.reducer = alone(parameters, collective=twins, **options)
    return twins.reducer, twins


def run(
    reducer: BucketReducer | LocalReducer,
    losses: Sequence[Callable[[], Tensor]],
    *,
    last: bool = True,
    zero: nn.Module | None = None,
    before_reduce: Callable[[], None] | None = None,
) -> None:
    """Run a batch of a stage, with a backward for each loss."""
    reducer.begin(last=last)
    for place, loss in enumerate(losses):
        reducer.backward(0, first=place == 0, last=place == len(losses) - 1)
        loss().backward()
    reducer.backward_ended(0)
    if before_reduce is not None:
        before_reduce()
    reducer.reduce(0)
    reducer.end()
    assert all(p.grad is None for p in reducer.parameters.values())
    if zero is not None:
        zero.zero_grad(set_to_none=False)
    reducer.finish(last=last)
    reducer.show(reducer.reached())


# windows


def of_kind(module: nn.Module, kind: str) -> BucketReducer | LocalReducer:
    parameters = dict(module.named_parameters())
    return alone(parameters) if kind == "buckets" else LocalReducer(module, parameters)


KINDS = ("buckets", "autograd's")


def gathered(dtype: torch.dtype, kind: str, batches: int) -> tuple[nn.Linear, Any, nn.Linear]:
    torch.manual_seed(0)
    module, plain = nn.Linear(3, 2, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    reducer = of_kind(module, kind)
    for batch in range(batches):
        parts = torch.full((4, 3), batch + 1.0, dtype=dtype).split(2)
        run(
            reducer,
            [lambda x=x: module(x).square().sum() for x in parts],  # type: ignore[misc]
            last=batch == batches - 1,
            zero=module,
        )
        for x in parts:
            plain(x).square().sum().backward()
    return module, reducer, plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_of_a_window_equal_plain_accumulation(kind: str, batches: int) -> None:
    module, _, plain = gathered(torch.float32, kind, batches)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_bf16_parameters_gather_in_fp32() -> None:
    module, reducer, plain = gathered(torch.bfloat16, "buckets", 2)
    for unit in reducer.units:
        assert unit.gradient.dtype == torch.bfloat16, "rounded once the window has ended"
        assert unit.gradient.untyped_storage().nbytes() == 4 * unit.numel, "in the memory of the sums"
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
        torch.testing.assert_close(mine.grad.float(), theirs.grad.float(), rtol=2e-2, atol=1e-2)


def test_bf16_gradients_of_a_window_are_added_and_rounded_in_fp32() -> None:
    module = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    reducer, parts = alone(dict(module.named_parameters())), (256.0, 1.0, 1.0)  # 256 + 1 is 256 in bf16
    for window in range(2):
        for number, part in enumerate(parts):
            run(reducer, [lambda part=part: part * module(torch.ones(1, 3).bfloat16()).sum()], last=number == 2)  # type: ignore[misc]
            assert module.weight.grad.dtype == torch.bfloat16
        assert module.weight.grad.tolist() == [[258.0] * 3], window


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_window_starts_from_zero(kind: str) -> None:
    module, reducer, _ = gathered(torch.float32, kind, 1)
    first = module.weight.grad.clone()
    module.zero_grad()
    run(reducer, [lambda x=x: module(x).square().sum() for x in torch.ones(4, 3).split(2)])  # type: ignore[misc]
    torch.testing.assert_close(module.weight.grad, first)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_nothing_reached_keep_no_gradient(kind: str) -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    run(of_kind(module, kind), [lambda: module["used"](torch.ones(1, 2)).sum()])
    assert module["unused"].weight.grad is None and module["used"].weight.grad is not None


def test_thawing_a_parameter_lays_the_buckets_out_anew() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = alone(dict(module.named_parameters()))
    for thawed in (False, True):
        module[0].requires_grad_(thawed)
        run(reducer, [lambda: module(torch.ones(1, 2)).sum()])
        assert (module[0].weight.grad is not None) == thawed
    run(reducer, [lambda: module(torch.ones(1, 2)).sum()], last=False)
    before = module[1].weight.grad.clone()
    module[0].requires_grad_(False)
    run(reducer, [lambda: module(torch.ones(1, 2)).sum()])
    torch.testing.assert_close(module[1].weight.grad, 2 * before)


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


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_autograd_did_not_accumulate(kind: str) -> None:
    module = nn.Linear(3, 2)
    reducer = of_kind(module, kind)
    reducer.begin(last=True)
    names, parameters = zip(*module.named_parameters(), strict=True)
    for _ in range(2):
        for name, gradient in zip(names, torch.autograd.grad(module(torch.ones(1, 3)).sum(), parameters), strict=True):
            reducer.add(name, gradient)
    reducer.reduce(0)
    reducer.end()
    reducer.finish(last=True)
    reducer.show(reducer.reached())
    assert module.weight.grad.tolist() == [[2.0] * 3] * 2 and module.bias.grad.tolist() == [2.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_between_batches_is_the_users_own(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1, bias=False, dtype=dtype)
    reducer = alone(dict(module.named_parameters()))
    run(reducer, [lambda: module(torch.ones(1, 2, dtype=dtype)).sum()])
    module.zero_grad()
    module(torch.full((1, 2), 3.0, dtype=dtype)).sum().backward()
    assert module.weight.grad.tolist() == [[3.0, 3.0]]
    assert reducer.units[0].gradient.tolist() == [1.0, 1.0]  # type: ignore[union-attr]


# buckets


def test_buckets_follow_the_given_order_and_are_padded() -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    names = [name for name, _ in module.named_parameters()][::-1]
    module[1].to(torch.float64)
    parameters = dict(module.named_parameters())
    reducer = alone(
        {n: parameters[n] for n in names},
        placement=Placement((tuple(range(8)),)),
        bucket_bytes=60,
        shared={(0, 1): ["3.bias"]},
    )
    reducer.lay_out()
    assert [unit.names for unit in reducer.units] == [
        ("3.weight", "2.bias"),
        ("1.bias",),
        ("1.weight",),
        ("2.weight", "0.bias"),
        ("0.weight",),
        ("3.bias",),
    ]
    assert [unit.ranks for unit in reducer.units] == [()] * 5 + [(0, 1)]
    for unit in reducer.units:
        assert unit.numel % 8 == 0 and unit.numel - 8 < sum(parameters[n].numel() for n in unit.names)
        assert unit.gradient is not None and unit.gradient.dtype == parameters[unit.names[0]].dtype


def test_buckets_end_where_stages_end() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    named = dict(reversed(list(module.named_parameters())))
    reducer = alone(named, stages=(0, 1), stages_of={name: {int(name[0]) // 2} for name in named})
    reducer.lay_out()
    assert [set(unit.names) for unit in reducer.units] == [{"2.bias", "2.weight"}, {"0.bias", "0.weight"}]
    reducer = alone(named)
    reducer.lay_out()
    assert len(reducer.units) == 1, "without stages they share one"


def test_the_type_of_the_buckets() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, dtype=torch.float16)})
    module["c"] = nn.Linear(2, 2, dtype=torch.float64)
    reducer = alone(dict(module.named_parameters()))
    reducer.lay_out()
    found = {name[0]: unit.gradient.dtype for unit in reducer.units for name in unit.names if unit.gradient is not None}
    assert found == {"a": torch.float32, "b": torch.float32, "c": torch.float64}


# reductions


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


def test_what_the_last_backward_does_not_reach_holds_up_the_order_until_its_end() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["c"] = nn.Linear(2, 2, bias=False)
    reducer, twins = made(module)
    seen: list[tuple[str, ...]] = []
    loss = lambda: module["a"](module["c"](torch.ones(1, 2))).sum()  # noqa: E731
    run(reducer, twice(loss), before_reduce=lambda: seen.extend(twins.order))
    assert seen == twins.order == [("c.weight",), ("b.weight",), ("a.weight",)], "the stage's send came between"
    assert module["b"].weight.grad is None and module["a"].weight.grad is not None


def test_several_stages_of_a_rank_must_all_have_passed() -> None:
    module = nn.Linear(2, 2, bias=False)
    reducer, twins = made(module, stages_of={"weight": {0, 2}}, stages=(0, 2))
    reducer.begin(last=True)
    for stage in (2, 0):
        assert twins.order == []
        reducer.backward(stage, first=True, last=True)
        module(torch.ones(1, 2)).sum().backward()
        reducer.backward_ended(stage)
        reducer.reduce(stage)
    assert twins.order == [("weight",)]


def test_what_stages_share_is_summed_over_them_first_and_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    over: list[Any] = []
    reducer, twins = made(module, shared={(0, 1): ["1.weight"]})
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, **_: over.append(group) or times(tensor, 3))
    run(reducer, [lambda: module(torch.ones(1, 2)).sum()])
    assert twins.order == [("0.weight",), ("1.weight",)]
    assert over == ["stages", "stages", "replicas"]
    plain = torch.autograd.grad(module(torch.ones(1, 2)).sum(), module[1].weight)[0]
    torch.testing.assert_close(module[1].weight.grad, 2 * 3 * plain)


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
