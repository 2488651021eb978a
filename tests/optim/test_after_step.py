"""Functions registered to run after a step run once, when the whole step is done."""

from typing import Any

import pytest
import torch

from lightning_holmes.optim.after_step import AfterStep

pytestmark = pytest.mark.versions


class Derived(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        try:
            super().step(closure)
        except ZeroDivisionError:
            pass
        if self.fails:
            raise RuntimeError("planned failure")


def fail() -> float:
    raise ZeroDivisionError


def test_once_for_each_step_also_where_one_has_raised() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # from now on torch calls hooks for its step
    optimizer = Derived([torch.zeros(1, requires_grad=True)], lr=0.1)
    nested: list[None] = []
    optimizer.register_step_post_hook(lambda *_: nested.append(None))
    done: list[None] = []
    handle = AfterStep(optimizer, lambda: done.append(None))
    optimizer.step()
    assert (len(done), len(nested)) == (1, 2)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="planned failure"):
        optimizer.step()
    assert len(done) == 1
    optimizer.fails = False
    optimizer.step(fail)  # the class's own step raises, the derived class's step goes on
    assert len(done) == 2
    optimizer.step()
    assert len(done) == 3
    handle.remove()
    optimizer.step()
    assert len(done) == 3
