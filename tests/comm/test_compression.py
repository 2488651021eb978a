"""The state that PowerSGD keeps from one sum to the next, without a network: one member, whose sums are its own
values."""

import torch
from torch import Tensor

from lightning_holmes.comm.collectives import Compressed, rehearsal
from lightning_holmes.comm.compression import PowerSGD, Rounding


class Alone:
    """A collective with one member."""

    name = "alone"

    def sum(self, tensor: Tensor) -> None:
        pass

    scatter = gather = sum


def compressed(compressor: PowerSGD, buffer: Tensor) -> Compressed:
    compressor.lay_out([(buffer, [(0, torch.Size((12, 9)))])])
    return Compressed(Alone(), compressor)


def below(rows: int) -> Tensor:
    """Return a matrix of rank 1 whose first rows are zero."""
    column = torch.arange(12.0) * (torch.arange(12) >= rows)
    return torch.outer(column, torch.linspace(-1.0, 1.0, 9)).flatten()


def test_a_rehearsal_is_forgotten_and_leaves_zeros_as_they_are() -> None:
    buffer, twin = torch.zeros(108), torch.zeros(108)
    measured, other = compressed(PowerSGD(2), buffer), compressed(PowerSGD(2), twin)
    for step in range(3):
        buffer.zero_()
        rehearsal(measured).sum(buffer)
        rehearsal(measured).scatter(buffer)
        assert not buffer.any()
        for tensor in (buffer, twin):
            tensor.copy_(torch.randn(108, generator=torch.Generator().manual_seed(step)))
        measured.sum(buffer)
        other.sum(twin)
        assert torch.equal(buffer, twin), f"step {step}: measuring has left something behind"


def test_what_keeps_nothing_rehearses_itself() -> None:
    rounding = Rounding(torch.bfloat16)
    assert rounding.rehearsal() is rounding
    assert rehearsal(Alone()).name == "alone"


def test_a_matrix_is_sent_after_a_step_without_gradients() -> None:
    buffer = torch.zeros(108)
    collective = compressed(PowerSGD(2), buffer)
    collective.sum(buffer)  # a step without gradients: Q would be zero from here on
    buffer.copy_(below(6))
    collective.sum(buffer)
    torch.testing.assert_close(buffer, below(6), rtol=1e-5, atol=1e-5)
