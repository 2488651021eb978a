"""The numbers by which a loss divides, and whether parts of a batch have their shares of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_holmes.pipeline.divisors import Divisors, are_shares, divisors_of

Y = torch.tensor([0, 1, -100, 2, -100, 0])
MASK = (Y > 0).float()
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "a mean": (lambda out: out.square().mean(), [18]),
    "ignored targets": (lambda out: F.cross_entropy(out, Y), [4]),
    "weights of classes": (lambda out: F.cross_entropy(out, Y, weight=torch.tensor([1.0, 2, 3])), [7]),
    "smoothed": (lambda out: F.cross_entropy(out, Y, label_smoothing=0.1), [4, 4]),
    "a mask": (lambda out: (F.cross_entropy(out, Y, reduction="none") * MASK).sum() / MASK.sum(), [2]),
    "a mask inside the sum": (lambda out: (out.sum(1) * MASK / MASK.sum()).sum(), [2]),
    "chosen rows": (lambda out: F.mse_loss(out[Y > 0], torch.zeros(2, 3)), [6]),
    "several terms": (lambda out: 2 * F.cross_entropy(out, Y) + out.mean() + out.square().sum() / 6, [4, 18, 6]),
    "a mean of each sample's": (lambda out: out.mean(1).mean(), [6]),
    "a sum": (lambda out: out.square().sum(), []),
    "a checkpoint": (lambda out: checkpoint(F.cross_entropy, out, Y, use_reentrant=False), [4]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_they_are_read_off_the_graph_of_the_loss_and_its_backward_runs_as_before(name: str) -> None:
    layer = nn.Linear(4, 3)
    make, expected = LOSSES[name]
    loss = make(layer(torch.randn(6, 4)))
    assert sorted(map(float, divisors_of(loss))) == pytest.approx(sorted(expected))
    loss.backward()
    assert layer.weight.grad is not None


def test_parts_have_their_shares_where_divisors_grow_with_the_weights_or_are_alike() -> None:
    assert are_shares([12, 8, 4], [3, 2, 1]) and are_shares([5, 5, 5], [3, 2, 1]) and are_shares([6, 0], [2, 0])
    assert not are_shares([12, 7, 5], [3, 2, 1]) and not are_shares([float("nan"), 1], [1, 1])


def test_terms_that_are_not_checked_and_other_losses_are_passed_over() -> None:
    weight, divisors = torch.ones(4, requires_grad=True), Divisors(2)
    for microbatch, count in enumerate((1.0, 3.0)):
        divisors.note(microbatch, weight.mean() + weight.sum() / torch.tensor(count))
    assert divisors.unshared([2, 2], [True, False]) == () == divisors.unshared([2, 2], [True])
    assert divisors.unshared([2, 2], [True, True]) == (1, 3)
    assert divisors.unshared([1, 3], [True, True]) == ()
