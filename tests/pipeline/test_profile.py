"""Profiles: FLOPs and bytes computed by hand, equal for fake and real runs, a 39 B model without its weights, measured seconds."""

import copy
import itertools
import time
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import profile
from lightning_holmes.pipeline.profile import build_fake, profile_step, time_in_turn
from lightning_holmes.pipeline.repeats import undisturbed
from lightning_holmes.pipeline.shadow import shadow_copy, share_layer_memory, with_own_gradients
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.plan.layer_cost import ModelCost
from recipes.gpt import GPT


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(samples * length).reshape(samples, length) % 50
    return {"input_ids": ids, "labels": ids}


class Stack(LightningModule):
    """Linear layers between two others; with ``look``, the step reads a value."""

    def __init__(self, *, look: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.leave = nn.Linear(8, 2, bias=False)
        self.look = look
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)
        if frozen:
            self.enter.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x = self.enter(batch)
        for layer in self.layers:
            x = layer(x).relu()
        loss = self.leave(x).square().mean()
        self.log("loss", loss)
        if self.look and float(loss.detach()) < 0:
            raise AssertionError
        return loss


def test_linear_layers_by_hand() -> None:
    cost = profile_step(Stack(), (torch.randn(5, 3), 0))
    assert (cost.unit, cost.microbatch_samples, cost.num_layers) == ("flops", 5, 4)
    assert cost.before.forward == 2 * 5 * 3 * 8 and cost.after.forward == 2 * 5 * 8 * 2
    assert [layer.forward for layer in cost.layers] == [2 * 5 * 8 * 8] * 4
    assert [layer.backward for layer in cost.layers] == [4 * 5 * 8 * 8] * 4  # for the weight and for the input
    assert cost.before.backward == 2 * 5 * 3 * 8  # its input needs no gradient
    assert cost.after.backward == 4 * 5 * 8 * 2
    assert [layer.activation_bytes for layer in cost.layers] == [4 * 5 * 8] * 4
    assert [layer.parameter_bytes for layer in cost.layers] == [4 * 64] * 4
    assert (cost.before.parameter_bytes, cost.after.parameter_bytes) == (4 * 24, 4 * 16)
    # a layer holds its input, which shares memory with the saved output of the relu before it
    assert [layer.held_bytes for layer in cost.layers] == [4 * 5 * 8] * 4
    assert cost.before.held_bytes == 4 * 5 * 3


def test_products_and_what_other_operators_move_by_hand() -> None:
    layer = profile_step(Stack(), (torch.randn(5, 3), 0)).layers[1]
    assert (layer.forward_products, layer.backward_products) == (1, 2)
    values = 5 * 8 * 4  # bytes of an activation
    # a layer's output goes through relu before the next layer, which reads and writes; its backward reads gradient and output, and writes
    assert (layer.forward_moved_bytes, layer.backward_moved_bytes) == (2 * values, 3 * values)
    assert layer.recomputed == 0


def test_a_module_that_recomputes_its_layers_has_that_told_apart() -> None:
    plain, again = (
        profile_step(
            GPT(
                hidden_size=32,
                num_layers=2,
                num_heads=2,
                sequence_length=8,
                vocab_size=64,
                gradient_checkpointing=checkpointing,
            ),
            (tokens(2, 8), 0),
        )
        for checkpointing in (False, True)
    )
    assert plain.recomputed == 0 and again.recomputed > 0
    # the last product of a layer need not be repeated
    assert [layer.recomputed for layer in again.layers] == [
        pytest.approx(layer.forward, rel=0.4) for layer in plain.layers
    ]
    assert again.forward + again.backward - again.recomputed == pytest.approx(plain.forward + plain.backward)
    assert again.with_recomputation().backward == again.backward, "it is not run a third time"


def test_gpt_by_formula_and_its_structure() -> None:
    model = GPT(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, sequence_length=16, tie_embeddings=True)
    batch = tokens(2, 16)
    structure = trace_step(model, "training_step", (batch, 0))
    with_structure = profile_step(model, (batch, 0), structure=structure)
    cost = profile_step(model, (batch, 0))
    assert cost == with_structure
    b, s, h, v = 2, 16, 32, 64
    assert [layer.forward for layer in cost.layers] == [24 * b * s * h * h + 4 * b * s * s * h] * 3
    assert cost.layers[1].backward == 48 * b * s * h * h + 10 * b * s * s * h  # fused attention computes scores again
    assert cost.after.forward == 2 * b * s * h * v
    assert cost.shared_bytes == 4 * v * h and cost.parameter_bytes == sum(4 * p.numel() for p in model.parameters())
    assert cost.tokens_per_sample == 16 and cost.layers[0].activation_bytes == 4 * b * s * h
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fake_and_real_runs_count_the_same() -> None:
    # reading a value makes the fake run impossible; the profile then runs on real tensors
    x = torch.randn(5, 3)
    torch.manual_seed(0)
    real = profile_step(Stack(look=True), (x, 0))
    assert real == profile_step(Stack(), (x, 0))


def test_the_module_stays_as_it_was() -> None:
    module = Stack(look=True)
    before = copy.deepcopy(module.state_dict())
    for mode in ("fake", "measure"):
        profile_step(module, (torch.randn(5, 3), 0), mode=mode)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "forward" not in vars(module.layers[0])


def test_frozen_layers_have_no_backward() -> None:
    cost = profile_step(Stack(frozen=2), (torch.randn(5, 3), 0))
    assert [layer.backward for layer in cost.layers] == [0, 0, 2 * 5 * 64, 4 * 5 * 64]
    assert cost.before.backward == 0
    assert [layer.trained_bytes for layer in cost.layers] == [0, 0, 256, 256]


def test_39_billion_parameters_without_memory_in_under_10_seconds() -> None:
    start = time.process_time()
    model = build_fake(
        lambda: GPT(vocab_size=51200, hidden_size=8192, num_layers=48, num_heads=64, sequence_length=2048)
    )
    cost = profile_step(model, (tokens(4, 2048), 0))
    taken = time.process_time() - start
    assert taken < 10.0, taken
    assert cost.parameter_bytes == pytest.approx(4 * 39.5e9, rel=0.01)
    # formula of the SC21 paper: 96 B s L h^2 (1 + s/6h + V/16Lh) with recomputation; without it three quarters, and the head
    # is never recomputed: 72 B s L h^2 (1 + s/6h) + 6 B s h V, plus the scores that fused attention computes again
    b, s, layers, h, v = 4, 2048, 48, 8192, 51200
    expected = 72 * b * s * layers * h * h * (1 + s / (6 * h)) + 6 * b * s * h * v + 2 * b * s * s * h * layers
    assert cost.forward + cost.backward == pytest.approx(expected, rel=1e-6)
    assert cost.alike
    assert cost.layers[0].activation_bytes == 4 * b * s * h


class Ticking(TorchDispatchMode):  # type: ignore[misc]
    """A clock that advances by one second with each operator, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))

    def thread_time(self) -> float:
        return float(self.count)

    perf_counter = thread_time


def test_measured_seconds_are_those_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, sequence_length=64)
    batch = tokens(8, 64)
    with Ticking() as clock:
        monkeypatch.setattr(profile, "time", clock)
        cost = profile_step(model, (batch, 0), mode="measure")
        monkeypatch.undo()
        began = clock.count
        loss = model.compute_loss(batch)
        computed = clock.count
        loss.backward()
        ended = clock.count
    assert cost.unit == "seconds" and cost.forward == computed - began
    assert cost.backward == pytest.approx(ended - computed, rel=0.02)  # plus the operators that detach layers' outputs
    assert len({(layer.forward, layer.backward) for layer in cost.layers[1:-1]}) == 1, "layers that are alike"
    assert all(layer.forward > 0 and layer.backward > 0 for layer in cost.layers)
    assert cost.layers[0].held_bytes == profile_step(model, (batch, 0)).layers[0].held_bytes


def test_microbatches_of_two_sizes_are_timed_in_turn() -> None:
    seen: list[int] = []

    class Seen(Stack):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch))
            return super().training_step(batch, batch_idx)

    small, large = time_in_turn(Seen(), {2: (torch.randn(2, 3), 0), 500: (torch.randn(500, 3), 0)})
    assert len(seen) >= 12 and seen == [2, 500] * (len(seen) // 2), "what is slow for a while is so for both"
    assert (small.microbatch_samples, large.microbatch_samples) == (2, 500) and small.unit == large.unit == "seconds"
    assert large.layers[0].held_bytes > 100 * small.layers[0].held_bytes > 0
    assert all(layer.forward > 0 < layer.backward for cost in (small, large) for layer in cost.layers)


def test_layers_are_timed_in_the_memory_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two pipeline ranks, five layers share the memory of weights and gradients of three, as many as a rank holds; the
    module keeps its own."""
    model = GPT(vocab_size=50, hidden_size=16, num_layers=5, num_heads=2, sequence_length=8)
    before = copy.deepcopy(model.state_dict())
    shadow = with_own_gradients(shadow_copy(model))
    share_layer_memory(shadow, "layers", 3)
    for _ in range(2):  # the second run adds to what the first left
        shadow.compute_loss(tokens(2, 8)).backward()
    weights = [layer.mlp[0].weight for layer in shadow.layers]
    assert [weights[i].data_ptr() == weights[j].data_ptr() for i, j in ((0, 3), (1, 4), (0, 1))] == [True, True, False]
    assert weights[3].grad.data_ptr() == weights[0].grad.data_ptr()
    assert all(p.grad is None for p in model.parameters())
    shared: list[int] = []
    monkeypatch.setattr(
        profile, "share_layer_memory", lambda *given: (shared.append(given[2]), share_layer_memory(*given))
    )
    for size in (1, 2):
        profile_step(model, (tokens(2, 8), 0), mode="measure", pipeline_parallel_size=size)
    assert shared == [5, 3], "of five layers a stage of two has three"
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_layers_that_are_unlike_frozen_or_tied_keep_their_memory_when_timed() -> None:
    def moved(stack: Stack) -> list[bool]:
        shadow = with_own_gradients(shadow_copy(stack))
        before = [layer.weight.data_ptr() for layer in shadow.layers]
        share_layer_memory(shadow, "layers", 1)
        return [layer.weight.data_ptr() != pointer for layer, pointer in zip(shadow.layers, before, strict=True)]

    tied, unlike, reused = Stack(), Stack(), Stack()
    tied.layers[1].weight = tied.layers[3].weight
    unlike.layers[2].weight = nn.Parameter(torch.randn(8, 4).T)  # another stride
    reused.leave_too = reused.layers[2]  # one module under two names
    assert moved(Stack()) == [False, True, True, True]
    assert moved(tied) == [False, False, True, False]
    assert moved(Stack(frozen=1)) == [False] * 4, "all that train are unlike the first, which is frozen"
    assert moved(unlike) == moved(reused) == [False, True, False, True]


def test_the_quicker_half_counts_whatever_a_repeat_lasts() -> None:
    assert undisturbed([0.2, 0.3, 0.25, 0.9, 0.21]) == [0, 2, 4]
    # pauses of a tenth of a second in every second repeat: blocks of two, 0.075 s each, but for one that was disturbed
    stops = [0.025, 0.125] * 3 + [0.025, 0.325] + [0.025, 0.125] * 2
    assert undisturbed(stops) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert undisturbed([0.010, 0.011, 0.020, 0.009]) == [0, 1, 3], "too short for blocks"
    assert undisturbed([0.010]) == [0] and undisturbed([3.0, 2.0]) == [1]


def test_pauses_count_for_the_step_and_do_not_make_layers_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host pauses whenever the wall clock is read, and the thread clock advances by a millisecond between two reads: a
    repeat's total must come from the wall clock, and the layers' shares in it from the thread clock."""
    model = GPT(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, sequence_length=64)
    threads = torch.get_num_threads()

    def cost_with_pauses_of(seconds: float) -> ModelCost:
        paused, worked = itertools.count(step=seconds), itertools.count(step=0.001)
        clocks = SimpleNamespace(thread_time=lambda: next(worked), perf_counter=lambda: next(paused))
        monkeypatch.setattr(profile, "time", clocks)
        return profile_step(model, (tokens(8, 64), 0), mode="measure")

    torch.set_num_threads(1)
    try:
        short, long = cost_with_pauses_of(0.5), cost_with_pauses_of(1.5)
    finally:
        torch.set_num_threads(threads)
    assert 0.25 < short.forward + short.backward <= 0.5, (
        "one pause a repeat, less what lies before and after the layers"
    )
    assert long.forward + long.backward == pytest.approx(3 * (short.forward + short.backward))
    whole = [layer.forward + layer.backward for layer in short.layers]
    assert max(whole) < 4 * min(whole), whole


class Recomputes(Stack):
    """Runs each layer as a whole under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False)) for _ in range(4)
        )

    def training_step(self, batch, batch_idx):
        x = self.enter(batch)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).relu()
        return self.leave(x).square().mean()


@pytest.mark.parametrize("mode", ["fake", "measure"])
def test_layers_that_are_run_again_in_the_backward_count_there(mode: Literal["fake", "measure"]) -> None:
    cost = profile_step(Recomputes(), (torch.randn(5, 3), 0), mode=mode)
    assert cost.num_layers == 4 and cost.layers[0].backward > 0
    if mode == "fake":
        product = 2 * 5 * 8 * 8
        assert [layer.forward for layer in cost.layers] == [2 * product] * 4
        # each product has one for the weight and one for the input; the last product of a layer need not be repeated
        assert [layer.backward for layer in cost.layers] == [4 * product + product] * 4
        assert [layer.recomputed for layer in cost.layers] == [product] * 4


def test_what_cannot_be_profiled_is_named() -> None:
    with pytest.raises(UnsupportedModuleError, match="does not run on tensors without values"):
        profile_step(build_fake(lambda: Stack(look=True)), (torch.randn(5, 3), 0))
    with pytest.raises(UnsupportedModuleError, match="no real weights"):
        profile_step(build_fake(Stack), (torch.randn(5, 3), 0), mode="measure")


class Counting(Stack):
    """Keeps a metric, whose state is a tensor besides parameters and buffers, and reads a value of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean.update(batch.mean())
        self.total = float(batch.sum())
        return super().training_step(batch, batch_idx)


def test_a_metric_of_the_module_is_neither_changed_nor_made_fake() -> None:
    module = Counting()
    module.mean.update(torch.tensor(3.0))
    state = copy.deepcopy(module.mean.metric_state)
    profile_step(module, (torch.randn(5, 3), 0))
    assert module.mean.metric_state.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in module.mean.metric_state.items())
    assert float(module.mean.compute()) == 3.0


def test_operators_may_be_charged_a_time_of_their_own() -> None:
    plain = profile_step(Stack(), (torch.randn(5, 3), 0))
    charged = profile_step(Stack(), (torch.randn(5, 3), 0), operator_s=1e-3)
    assert all(layer.fixed_forward_s == 0 for layer in plain.layers)
    seconds = [layer.fixed_forward_s for layer in charged.layers]
    # a product, and the relu after it, which belongs to no layer; views cost nothing
    assert seconds == pytest.approx([2e-3, 2e-3, 2e-3, 1e-3])
    assert [layer.fixed_backward_s for layer in charged.layers] == pytest.approx([2 * s for s in seconds])
    assert [layer.forward for layer in charged.layers] == [layer.forward for layer in plain.layers]
