"""Split backwards: the same gradients as a whole backward, whatever the graph looks like; and what is refused."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_holmes
from lightning_holmes.pipeline.split_backward import SplitBackward

Graph = Callable[[dict[str, nn.Parameter], list[Tensor]], list[Tensor]]


def chain(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    hidden = F.layer_norm(x[0] @ p["a"], (4,), p["scale"])
    return [torch.tanh(hidden) @ p["b"]]


def used_twice(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    return [torch.tanh(x[0] @ p["a"]) @ p["a"]]


def conditioned(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    """A value that the stage computes itself and several places read, as a time embedding; each place also has a matrix."""
    condition = torch.tanh(p["scale"] @ p["c"])
    hidden = x[0] * (1 + condition @ p["a"])
    return [torch.tanh(hidden * (condition @ p["b"])) @ p["b"]]


def beside_the_input(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    """A second output that does not depend on the input, but on parameters that the first one reads, too."""
    return [torch.tanh(x[0] @ p["a"]) @ p["b"], (p["scale"] @ p["a"]) @ p["c"]]


def view(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    return [(x[0] @ p["a"]).transpose(0, 1)]


def two_inputs_one_unused(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    return [torch.tanh(x[0]) @ p["a"]]


def hooked(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    """User hooks on the outputs of matrix products change the gradient, once each, for everything before them in the forward."""
    hidden = x[0] @ p["a"]
    hidden.register_hook(lambda gradient: -3.0 * gradient)
    first, second = (torch.tanh(hidden) @ p["b"]).chunk(2, dim=-1)
    second.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    return [torch.cat((first, second), dim=-1) @ p["c"]]


class Overwriting(torch.autograd.Function):
    """Its backward can run only once: it overwrites the saved tensors, as fused kernels do."""

    @staticmethod
    def forward(ctx, value: Tensor, matrix: Tensor) -> Tensor:
        ctx.kept = [value.detach().clone(), matrix.detach().clone()]
        return value @ matrix

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, matrix = ctx.kept
        of_value = gradient @ matrix.T
        of_matrix = value.T @ gradient
        value.zero_()
        matrix.zero_()
        return of_value, of_matrix


def own_function(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    return [Overwriting.apply(torch.tanh(x[0] @ p["a"]), p["b"])]


def nothing_of_the_input(p: dict[str, nn.Parameter], x: list[Tensor]) -> list[Tensor]:
    return [p["scale"] @ p["a"]]


@pytest.mark.parametrize(
    "graph",
    [
        chain,
        used_twice,
        conditioned,
        beside_the_input,
        view,
        two_inputs_one_unused,
        hooked,
        own_function,
        nothing_of_the_input,
    ],
)
def test_gradients_are_those_of_a_whole_backward(graph: Graph) -> None:
    torch.manual_seed(1)
    parameters = {name: nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for name in "abc"}
    parameters["scale"] = nn.Parameter(torch.randn(4, dtype=torch.float64))
    values = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]

    whole = [value.clone().requires_grad_() for value in values]
    roots = graph(parameters, whole)
    gradients = [torch.randn_like(root) for root in roots]
    torch.autograd.backward(roots, gradients)
    expected = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None

    split = [value.clone().requires_grad_() for value in values]
    found: dict[str, Tensor] = {}

    def accumulate(name: str, gradient: Tensor) -> None:
        assert name not in found, "each parameter's gradient comes whole"
        found[name] = gradient.clone()

    names = {id(parameter): name for name, parameter in parameters.items()}
    parts = SplitBackward(graph(parameters, split), gradients, split, parameters, names)
    parts.input(accumulate)
    for mine, theirs in zip(split, whole, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    early = set(found)
    parts.weight(accumulate)
    assert set(found) == {name for name, gradient in expected.items() if gradient is not None}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in parameters.values())
    if graph is chain:
        assert early == {"scale"}, "matrices wait for the second part"


class Stack(pl.LightningModule):
    """Linear layers in a row. ``reentrant``: activation checkpointing of each layer, of this kind (None: no checkpointing);
    ``frozen``: the number of frozen layers at the start."""

    def __init__(self, *, reentrant: bool | None = None, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.reentrant = reentrant
        self.layers[:frozen].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            if self.reentrant is None:
                hidden = torch.tanh(layer(hidden))
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden.square().mean()


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v"])
def test_what_a_split_would_break_is_refused_by_name(schedule: str) -> None:
    torch.manual_seed(1)
    options = {"num_microbatches": 2, "schedule": schedule, "steps": ["training_step"]}
    batch = torch.randn(4, 4)
    assert lightning_holmes.check(Stack(), batch, **options).ok
    refused = lightning_holmes.check(Stack(frozen=3), batch, **options).refused
    assert refused is not None and f"{schedule!r} splits the backward of stage 1" in refused and "frozen" in refused
    refused = lightning_holmes.check(Stack(reentrant=False), batch, **options).refused
    assert refused is not None and "activation checkpointing" in refused and schedule in refused
    assert lightning_holmes.check(Stack(reentrant=False), batch, **(options | {"schedule": "1f1b"})).ok
