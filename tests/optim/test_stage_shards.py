"""StageShards and LayeredReducer called directly, on one replica; tests/parity and
tests/strategy/test_sharded_parameters.py cover several."""

from collections.abc import Callable

import pytest
import torch
from groups_alone import ALONE
from torch import Tensor, nn

from lightning_holmes.comm.absent import plain
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.stage_buffers import StageBuffers
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.plan.placement import Placement

CPU = torch.device("cpu")


class Done:
    """Work that was done when it was started."""

    def wait(self) -> None:
        pass


class InlineQueue:
    """A queue that does everything at once and records the requests."""

    def __init__(self) -> None:
        self.on_run = None
        self.asked: list[str | None] = []

    def start(self, function: Callable[[], None], name: str | None = None, *, of: str = "") -> Done:
        self.asked.append(name)
        function()
        return Done()

    def close(self) -> None:
        pass


class Net(nn.Module):
    """Three layers of different sizes and types, a scale that all of them read, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)])
        self.layers[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))


def shards_of(module: Net, *, size: int = 1) -> tuple[StageShards, InlineQueue]:
    parameters = dict(reversed(list(module.named_parameters())))
    stages_of = {name: {int(name.split(".")[1])} if "layers" in name else {0, 1, 2} for name in parameters}
    queue = InlineQueue()
    shards = StageShards(
        parameters,
        stages=(0, 1, 2),
        stages_of=stages_of,
        shared={},
        size=size,
        rank=0,
        queue=queue,  # type: ignore[arg-type]
        collective=None,
    )
    return shards, queue


def is_blank(tensor: Tensor) -> bool:
    tensor = plain(tensor.data)  # in a step it says so who reads it
    return bool(tensor.isnan().all()) and tensor.untyped_storage().nbytes() <= 4


@pytest.mark.parametrize("by_elements", [True, False])
def test_a_stage_is_whole_only_while_it_is_held(by_elements: bool) -> None:
    torch.manual_seed(0)
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    shards, _ = shards_of(module)
    pieces = shards.lay_out(by_elements=by_elements)
    assert {piece.name for piece in pieces} == set(before)
    assert all(is_blank(p) and p.shape == before[n].shape for n, p in module.named_parameters())
    for piece in pieces:  # the optimizer's parameters are those that the module had
        assert torch.equal(shards.values(piece), before[piece.name].flatten()[piece.start : piece.stop])
    shards.unshard(0).wait()
    ahead = shards.unshard(1)
    held = {n for n, p in module.named_parameters() if not is_blank(p)}
    assert held == {"layers.0.weight", "layers.0.bias", "scale"}, "what several stages read is there with the first one"
    memory = module.layers[0].weight.untyped_storage().data_ptr()
    shards.reshard(0)
    ahead.wait()
    shards.unshard(2).wait()
    assert module.layers[2].weight.untyped_storage().data_ptr() == memory, "two buffers take turns"
    assert torch.equal(module.layers[1].bias, before["layers.1.bias"])
    shards.reshard(1)
    assert not is_blank(module.scale)
    shards.reshard(2)
    assert all(is_blank(p) for p in module.parameters())
    _check_twin(shards, before)
    shards.values(pieces[0]).add_(1)
    first = pieces[0].name
    assert torch.equal(shards.collect(lambda name: 0)[first], before[first] + 1)
    assert shards.collect(lambda name: 1) == {}
    shards.put(lambda: module.load_state_dict(before))  # type: ignore[arg-type, return-value]
    shards.close()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_small_stages_stay_for_the_step() -> None:
    """One message for all small stages at the beginning of the step, none for their backwards; stages of the buffers'
    size are gathered twice."""
    module = nn.ModuleList([nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.PReLU(), nn.BatchNorm1d(40)])
    by_name = dict(module.named_parameters())
    queue = InlineQueue()
    shards = StageShards(
        by_name,
        stages=range(5),
        stages_of={name: {int(name[0])} for name in by_name},
        shared={},
        size=1,
        rank=0,
        queue=queue,  # type: ignore[arg-type]
        collective=None,
    )
    shards.lay_out(by_elements=True)
    stays = {name for unit in shards.units if unit.stage is None for name in unit.names}
    assert stays == {"1.weight", "1.bias", "3.weight"}, "the second BatchNorm would make it more than a sixteenth"
    shards.unshard(0).wait()
    assert {name for name, p in by_name.items() if not is_blank(p)} == stays | {"0.weight", "0.bias"}
    for stage in (1, 2, 3, 4):
        shards.unshard(stage).wait()
        shards.reshard(stage - 1)
        assert not any(is_blank(by_name[name]) for name in stays)
    shards.reshard(4)
    assert all(map(is_blank, by_name.values()))


def _check_twin(shards: StageShards, before: dict[str, Tensor]) -> None:
    """Another copy of the module is sharded in the same way, and is restored; one replica has all of each parameter."""
    other = Net()
    values = {name: value.clone() for name, value in other.state_dict().items()}
    twin = shards.twin(dict(other.named_parameters()))
    for name, value in before.items():
        assert torch.equal(shards.own(name), value.flatten()) and torch.equal(twin.own(name), values[name].flatten())
        twin.own(name).copy_(shards.own(name))
    assert all(is_blank(p) for p in other.parameters())
    twin.close()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_run_that_has_failed_waits_for_no_values_and_one_replica_has_them_all() -> None:
    for size in (1, 2):
        module = Net()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        shards, queue = shards_of(module, size=size)
        shards.lay_out(by_elements=True)
        shards.abandon()
        shards.close()
        assert queue.asked == []
        whole = [torch.equal(value, before[name]) for name, value in module.state_dict().items()]
        assert all(whole) if size == 1 else all(is_blank(p) for p in module.parameters())


def test_what_autograd_has_saved_is_still_right_when_another_stage_was_between() -> None:
    torch.manual_seed(0)
    module = Net()
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad((module.layers[0](x) * module.scale).tanh().sum(), x)[0]
    shards, _ = shards_of(module)
    shards.lay_out(by_elements=True)
    shards.unshard(0).wait()
    output = (module.layers[0](x) * module.scale).tanh().sum()
    ahead = shards.unshard(1)
    shards.reshard(0)
    ahead.wait()
    other = shards.unshard(2)  # into the buffer of stage 0
    other.wait()
    shards.reshard(2)
    again = shards.unshard(0)
    shards.reshard(1)
    again.wait()
    torch.testing.assert_close(torch.autograd.grad(output, x)[0], expected)


def reducer_of(shards: StageShards, queue: InlineQueue) -> LayeredReducer:
    return LayeredReducer(shards, ALONE, Placement(((0,),)), queue=queue)  # type: ignore[arg-type]


def test_one_replica_adds_its_microbatches_and_its_batches() -> None:
    torch.manual_seed(0)
    module = Net()
    samples = torch.randn(2, 2, 6, 3)  # batches, microbatches
    plain = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in module.named_parameters()}
    for x in samples.flatten(0, 1):
        hidden = x
        for index in range(3):
            hidden = torch.nn.functional.linear(hidden, plain[f"layers.{index}.weight"], plain[f"layers.{index}.bias"])
        (hidden * plain["scale"]).square().mean().backward()
    shards, queue = shards_of(module)
    pieces = shards.lay_out(by_elements=True)
    reducer = reducer_of(shards, queue)
    for batch, of_batch in enumerate(samples):
        reducer.begin(last=batch == 1)
        _layered_batch(module, shards, reducer, of_batch)
        reducer.end()
        reducer.finish(last=batch == 1)
    assert reducer.reached() == {n for n, p in plain.items() if p.requires_grad}
    for piece in pieces:
        if plain[piece.name].requires_grad:
            expected = plain[piece.name].grad.flatten()[piece.start : piece.stop]  # type: ignore[union-attr]
            torch.testing.assert_close(shards.gradient(piece), expected)
    assert all(p.grad is None for p in module.parameters()), "nothing is left for zero_grad to find"


def _layered_batch(module: Net, shards: StageShards, reducer: LayeredReducer, of_batch: Tensor) -> None:
    """Run all stages forward, then backward in reverse, all microbatches through each."""
    inputs = [[x.clone().requires_grad_() for x in of_batch]]
    outputs: list[list[Tensor]] = []
    shards.unshard(0).wait()
    for stage in range(3):
        if stage < 2:
            ahead = shards.unshard(stage + 1)
        made = [module.layers[stage](x) for x in inputs[stage]]
        made = [(y * module.scale).square().mean() for y in made] if stage == 2 else made
        outputs.append(made)
        inputs.append([y.detach().requires_grad_() for y in made])
        if stage < 2:
            shards.reshard(stage)
            ahead.wait()
    for stage in (2, 1, 0):
        if stage:
            ahead = shards.unshard(stage - 1)
        for count, output in enumerate(outputs[stage]):
            reducer.backward(stage, first=count == 0, last=count == 1)
            output.backward(None if stage == 2 else inputs[stage + 1][count].grad)
        reducer.reduce(stage)
        shards.reshard(stage)
        if stage:
            ahead.wait()


def run_layer_1(reducer: LayeredReducer, shards: StageShards) -> None:
    """Run a batch that reaches one layer."""
    reducer.begin(last=True)
    for stage in (2, 1, 0):
        shards.unshard(stage).wait()
        reducer.backward(stage, first=True, last=True)
        if stage == 1:
            shards.parameters["layers.1.weight"].sum().backward()
            bias = shards.parameters["layers.1.bias"]
            (2 * bias.sum()).backward() if bias.requires_grad else None
        reducer.reduce(stage)
        shards.reshard(stage)
    reducer.end()
    reducer.finish(last=True)


def test_a_parameter_that_nothing_reached_has_no_gradient_and_a_thawed_one_has_one() -> None:
    module = Net()
    shards, queue = shards_of(module)
    shards.lay_out(by_elements=True)
    reducer = reducer_of(shards, queue)
    run_layer_1(reducer, shards)
    assert reducer.reached() == {"layers.1.weight"}
    module.layers[1].bias.requires_grad_(True)
    run_layer_1(reducer, shards)
    assert reducer.reached() == {"layers.1.weight", "layers.1.bias"}
    (unit,) = [unit for unit in shards.units if "layers.1.bias" in unit.names]
    assert unit.is_trained and unit.gradient is not None
    assert torch.equal(unit.views(unit.gradient)["layers.1.bias"], torch.full_like(module.layers[1].bias, 2.0))
    reducer.close()


def test_parts_of_unlike_types_lie_where_each_can_be_viewed() -> None:
    """Three numbers of two bytes come before numbers of four and of eight bytes."""
    sizes = [(3, torch.bfloat16), (5, torch.float32), (1, torch.float64)]
    buffers = StageBuffers({0: [(1, torch.float32)], 1: sizes, 2: [(2, torch.float32)], 3: sizes}, CPU)
    for stage in (1, 3):
        made = buffers.of(stage)
        for index, (tensor, (numel, dtype)) in enumerate(zip(made, sizes, strict=True)):
            assert tensor.shape == (numel,) and tensor.dtype == dtype
            tensor.fill_(index)
        assert [float(tensor[-1]) for tensor in made] == [0, 1, 2], "none lies in another"
    assert buffers.place(1) == buffers.place(3) != buffers.place(0) == buffers.place(2)
    assert buffers.of(1)[0].data_ptr() == buffers.of(3)[0].data_ptr()


def test_gradients_of_unlike_types_gather_in_their_own() -> None:
    module = Net()
    module.layers[2].to(torch.float64)
    module.layers[2].bias.data = module.layers[2].bias.data[:1].bfloat16()
    shards, queue = shards_of(module)
    shards.lay_out(by_elements=True)
    reducer = reducer_of(shards, queue)
    reducer.begin(last=True)
    reducer.backward(2, first=True, last=True)
    (module.layers[2].weight.sum() + module.layers[2].bias.double().sum() * 3).backward()
    assert module.layers[2].weight.grad.dtype == torch.float64 and bool((module.layers[2].weight.grad == 1).all())  # type: ignore[union-attr]
    of_bias = reducer._views["layers.2.bias"]
    assert of_bias.dtype == torch.float32 and bool((of_bias == 3).all()), "sums of 16 bits gather in fp32"
