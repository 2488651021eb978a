"""Profiles: FLOPs and bytes computed by hand, equal for fake and real runs, a 39 B model without its weights."""

import copy
import time

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import device_speed
from lightning_holmes.pipeline.profile import build_fake, profile_step
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
    assert (cost.microbatch_samples, cost.num_layers) == (5, 4)
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


def test_fake_and_real_runs_count_the_same() -> None:
    # reading a value makes the fake run impossible; the profile then runs on real tensors
    x = torch.randn(5, 3)
    torch.manual_seed(0)
    real = profile_step(Stack(look=True), (x, 0))
    assert real == profile_step(Stack(), (x, 0))


def test_the_module_stays_as_it_was() -> None:
    module = Stack(look=True)
    before = copy.deepcopy(module.state_dict())
    profile_step(module, (torch.randn(5, 3), 0))
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
    assert len(set(cost.layers)) == 1
    assert cost.layers[0].activation_bytes == 4 * b * s * h


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


def test_layers_that_are_run_again_in_the_backward_count_there() -> None:
    cost = profile_step(Recomputes(), (torch.randn(5, 3), 0))
    product = 2 * 5 * 8 * 8
    assert [layer.forward for layer in cost.layers] == [2 * product] * 4
    # each product has one for the weight and one for the input; the last product of a layer need not be repeated
    assert [layer.backward for layer in cost.layers] == [4 * product + product] * 4
    assert [layer.recomputed for layer in cost.layers] == [product] * 4


def test_what_cannot_be_profiled_is_named() -> None:
    with pytest.raises(UnsupportedModuleError, match="does not run on tensors without values"):
        profile_step(build_fake(lambda: Stack(look=True)), (torch.randn(5, 3), 0))


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


def test_other_work_that_takes_a_core_for_a_while_does_not_make_a_host_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run() -> torch.Tensor:
        now[0] += 0.05 if 0.45 < now[0] < 0.7 else 0.001
        return torch.ones(())

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert device_speed._rate(torch.device("cpu"), 1.0, 1, run) == pytest.approx(1000)
