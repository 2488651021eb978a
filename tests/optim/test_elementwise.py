"""Results of the test whether an optimizer is elementwise, for torch's optimizers and for kinds that users write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.optim.elementwise import Level, find_separability


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2, 2, 2, 2))]


class Users(Optimizer):
    """A user's optimizer: its constructor needs more than parameters, and ``update`` defines its update of one
    parameter."""

    def __init__(self, model_name: str, params: Any, update: Callable[[Any, dict[str, Any], Tensor], None]) -> None:
        super().__init__(params, {"lr": 0.0})
        self.model_name = model_name
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.norm = float(sum(p.grad.square().sum() for p in group["params"] if p.grad is not None))
            for p in group["params"]:
                if p.grad is not None:
                    self.update(self, group, p)


def lion(self: Any, group: dict[str, Any], p: Tensor) -> None:
    state = self.state[p]
    mean = state.setdefault("mean", torch.zeros_like(p))
    p.sub_(group["lr"] * (0.9 * mean + 0.1 * p.grad).sign())
    mean.lerp_(p.grad, 0.01)


def lamb(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.sub_(p.grad * group["lr"] * p.norm() / p.grad.norm())


def clipped_inside(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.sub_(group["lr"] * p.grad / max(1.0, float(p.grad.norm()) / 1e3))


def of_all_together(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.sub_(group["lr"] * p.grad / (self.norm**0.5 + 1e-8))


def one_variance(self: Any, group: dict[str, Any], p: Tensor) -> None:
    state = self.state[p]
    state["largest"] = torch.maximum(state.get("largest", torch.zeros(())), p.grad.abs().max())
    p.sub_(group["lr"] * p.grad.sign())


def by_dimensions(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.sub_(group["lr"] * (p.grad if p.ndim < 4 else p.grad / p.grad[0].norm()))


def factored_when_large(self: Any, group: dict[str, Any], p: Tensor) -> None:
    """Factors only large parameters, as some Adafactors do, whose smallest dimension to factor is 128."""
    square = p.grad.square() + 1e-30
    if p.ndim == 2 and min(p.shape) >= 128:
        square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    p.sub_(group["lr"] * p.grad * square.rsqrt())


def by_marks(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.sub_(p.own_rate * p.grad)  # type: ignore[attr-defined]


def marked() -> list[nn.Parameter]:
    found = parameters()
    for parameter in found:
        parameter.own_rate = 0.1  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("make", "level", "keys", "state_bytes"),
    [
        (lambda: torch.optim.SGD(parameters(), 0.1), "elements", set(), 0),
        (lambda: torch.optim.AdamW(parameters(), 0.0, fused=True), "elements", {"exp_avg", "exp_avg_sq"}, 8),
        (lambda: torch.optim.AdamW(parameters(), torch.tensor(0.1)), "elements", {"exp_avg", "exp_avg_sq"}, 8),
        (lambda: torch.optim.RAdam(parameters(), foreach=True), "elements", {"exp_avg", "exp_avg_sq"}, 8),
        (lambda: torch.optim.Adagrad(parameters()), "elements", {"sum"}, 4),
        (lambda: torch.optim.ASGD(parameters()), "elements", {"ax"}, 4),
        (lambda: torch.optim.Adafactor(parameters()), "parameters", None, None),
        (lambda: torch.optim.Muon(parameters()[:1]), "parameters", None, None),
        (lambda: torch.optim.LBFGS(parameters()), "none", None, None),
        (lambda: Users("a", parameters(), lion), "elements", {"mean"}, 4),
        (lambda: Users("a", parameters(), lamb), "parameters", None, None),
        (lambda: Users("a", parameters(), clipped_inside), "parameters", None, None),
        (lambda: Users("a", parameters(), one_variance), "parameters", None, None),
        (lambda: Users("a", parameters(), by_dimensions), "parameters", None, None),
        (lambda: Users("a", parameters()[:2], by_dimensions), "elements", set(), 0),
        (lambda: Users("a", parameters(), factored_when_large), "parameters", None, None),
        (lambda: Users("a", marked(), by_marks), "elements", set(), 0),
        (lambda: Users("a", parameters(), of_all_together), "none", None, None),
    ],
)
def test_what_an_optimizer_allows(
    make: Callable[[], Optimizer], level: Level, keys: set[str] | None, state_bytes: int | None
) -> None:
    optimizer = make()
    found = find_separability(optimizer, torch.device("cpu"))
    assert found.level == level, found.reason
    if keys is None:
        assert type(optimizer).__name__ in found.reason
    else:
        assert found.element_keys == (keys,) and found.reason == ""
        assert found.state_bytes == pytest.approx(state_bytes, abs=0.1)


def test_the_coarsest_group_decides_and_nothing_of_the_users_is_touched() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adafactor([{"params": [vector]}, {"params": [matrix]}], lr=0.1)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    state = torch.get_rng_state()
    assert find_separability(optimizer, torch.device("cpu")).level == "parameters"
    assert not optimizer.state and not called and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(matrix.detach(), torch.ones(4, 3)) and matrix.grad is None


def test_wrappers_and_optimizers_that_do_not_move_are_left_alone() -> None:
    class Lookahead(torch.optim.SGD):
        pass

    wrapper = Lookahead(parameters(), 0.1)
    wrapper.inner = torch.optim.SGD(parameters(), 0.1)  # type: ignore[attr-defined]
    assert "inner" in find_separability(wrapper, torch.device("cpu")).reason
    still = Users("a", parameters(), lambda self, group, p: None)
    assert "did not change a parameter" in find_separability(still, torch.device("cpu")).reason
