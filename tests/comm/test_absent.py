"""Placeholders stop a computation that would use their values, carry their names along, and affect nothing else."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Absence, Placeholder, Source, placeholder, plain
from lightning_holmes.errors import AbsentValueError, UnsupportedModuleError


def made(like: Tensor, what: str = "it") -> tuple[Absence, Source]:
    absence = Absence()
    return absence, Source(absence=absence, what=what, cure="num_chunks=1", blank=placeholder(like))


def test_what_is_computed_from_a_placeholder_is_one_until_it_counts() -> None:
    absence, source = made(torch.empty(2, 3))
    real, blank = torch.ones(2, 3), source.stand_in()
    derived = [
        2 * blank,
        real @ blank.t(),
        torch.cat([real, blank]),
        blank[0],
        blank.data,
        *torch.stack([real, blank]).unbind()[1:],
    ]
    derived += torch._foreach_add([blank, blank], 1.0)
    assert all(type(each) is Placeholder and bool(plain(each).isnan().any()) for each in derived)
    shaped = [torch.zeros_like(blank), blank.new_ones(2), real.expand_as(blank), real.to(blank), real.view_as(blank)]
    assert all(type(each) is Tensor for each in shaped)
    assert blank.shape == (2, 3) and blank.dtype == torch.float32 and len(blank) == 2 and "it" in repr(blank)
    weight = nn.Parameter(torch.ones(3))
    assert (weight * derived[0]).requires_grad
    assert type(copy.deepcopy(blank)) is Tensor and type(pickle.loads(pickle.dumps(blank))) is Tensor
    absence.counts = True
    assert type(derived[0].view(3, 2)) is Placeholder, "nobody has computed with it yet"
    for each in derived:
        with pytest.raises(AbsentValueError, match=r"^it is read where it was not .* num_chunks=1$"):
            each + 1


READS: list[Callable[[Any], Any]] = [
    bool,
    float,
    Tensor.item,
    lambda blank: blank.tolist(),
    lambda blank: blank.numpy(),
    Tensor.nonzero,
    lambda blank: "yes" if blank.norm() > 1 else "no",
    lambda blank: f"{blank:.2f}",
    lambda blank: torch.equal(blank, torch.ones(())),
    lambda blank: torch.ones(3)[blank > 0],
]


@pytest.mark.parametrize("read", READS)
def test_python_is_told_no_value(read: Callable[[Any], Any]) -> None:
    _, source = made(torch.empty(()))
    with pytest.raises(AbsentValueError, match="it is read"):
        read(source.stand_in() * 2)


def test_a_parameter_stays_the_object_that_it_is() -> None:
    parameter = nn.Parameter(torch.ones(3))
    absence, source = made(parameter.detach())
    module = nn.Module()
    module.weight = parameter
    absence.hide(parameter, source)
    assert (
        module.weight is parameter and isinstance(parameter, nn.Parameter) and type(parameter).__name__ == "Parameter"
    )
    assert parameter.shape == (3,) and parameter.requires_grad and parameter.grad is None
    parameter.grad = torch.ones(3)
    with absence.stepping():
        product = parameter * 2
        assert type(product) is Placeholder and product.requires_grad
        for change in (lambda: parameter.detach().clamp_(0), lambda: setattr(parameter, "data", torch.ones(3))):
            with pytest.raises(AbsentValueError, match="the step changes it"):
                change()
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(AbsentValueError, match="it is read"):
                copied(module)
    dtensor.replace_local(parameter, torch.ones(3))
    assert type(parameter) is nn.Parameter and vars(parameter) == {}
    assert (parameter * 2).sum() == 6


@pytest.mark.parametrize("stepping", [False, True])
def test_a_thread_of_its_own_never_reads_a_value_that_is_not_here(stepping: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    absence, source = made(parameter.detach())
    absence.hide(parameter, source)
    reads: list[Callable[[], Any]] = [
        lambda: parameter.detach(),
        lambda: parameter.data,
        lambda: torch.stack([parameter]),
        lambda: torch.stack(tensors=[parameter]),
        lambda: parameter.norm().item(),
        lambda: copy.deepcopy(parameter),
        lambda: pickle.dumps(parameter),
        lambda: parameter.clone().numpy(),
    ]
    with absence.stepping() if stepping else nullcontext(), ThreadPoolExecutor(1) as thread:
        for read in reads:
            with pytest.raises(AbsentValueError, match="it is read in a thread of its own"):
                thread.submit(read).result(timeout=60)
        shape = thread.submit(lambda: (torch.zeros_like(parameter).shape, parameter.numel())).result(timeout=60)
        assert shape == ((3,), 3)
    if not stepping:
        for read in reads:
            with pytest.raises(AbsentValueError, match="outside of steps and hooks"):
                read()


@pytest.mark.parametrize("error", [UnsupportedModuleError, AbsentValueError])
@pytest.mark.parametrize(
    "operator", [lambda t: t == 1.0, lambda t: torch.ones(2) - t, lambda t: 2 * t, lambda t: t @ t]
)
def test_a_refusal_inside_an_operator_is_the_error_that_the_user_sees(error: type[Exception], operator: Any) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise error("why")

    with pytest.raises(error, match=r"^why$"):
        operator(torch.ones(2).as_subclass(Refusing))
