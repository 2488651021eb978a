"""Arriving parameters that several threads read, and transfers that fail."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_holmes.optim.arriving import Arrival, ArrivingParameter


class Held:
    """A transfer that ends when it is told to; it writes 7."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.is_awaited, self.may_end = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_awaited.set()
        assert self.may_end.wait(60)
        self.values.fill_(7)


def test_each_of_two_reading_threads_waits() -> None:
    values = torch.zeros(3)
    parameter, transfer = nn.Parameter(values), Held(values)
    Arrival([parameter], transfer)
    seen: list[float] = []
    reads = [threading.Thread(target=lambda: seen.append(float(parameter.sum()))) for _ in range(2)]
    reads[0].start()
    assert transfer.is_awaited.wait(60)
    reads[1].start()
    reads[1].join(0.2)
    assert not seen and type(parameter) is ArrivingParameter
    transfer.may_end.set()
    for read in reads:
        read.join(60)
    assert seen == [21, 21] and type(parameter) is nn.Parameter


def test_every_reader_is_told_that_a_transfer_has_failed() -> None:
    class Fails:
        def wait(self) -> None:
            raise RuntimeError("lost")

    parameter = nn.Parameter(torch.zeros(3))
    arrival = Arrival([parameter], Fails())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            parameter.sum()
    arrival.forget()
    assert float(parameter.sum()) == 0
