"""Divisors: the numbers by which a loss divides: elements of a mean, targets that are not ignored, sums of weights and masks.

A batch may be split if each of them grows with the microbatch's weight, or is the same for all. They are read off the graph of
the loss, from the loss to where it is one number for the first time, so that every batch can be looked at.

    divisors = Divisors(num_microbatches)
    divisors.note(0, loss)                              # after the microbatch's step
    divisors.unshared(weights, checked)                 # [(5.0, 2.0)]: means over 5 and over 2 elements
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.torch_private import divisor_of, gives_one_number

_MOST_NODES = 64
_TOLERANCE = 1e-4


def divisors_of(loss: Tensor) -> list[Tensor | float]:
    """The divisors in the last operators of ``loss``, in an order that depends on the operators only."""
    found: list[Tensor | float] = []
    waiting: deque[Any] = deque([loss.grad_fn])
    seen: set[Any] = {None}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        divisor = divisor_of(node)
        if divisor is not None:
            found.append(divisor)
        if gives_one_number(node):
            waiting.extend(child for child, _ in node.next_functions)
    return found


def are_shares(divisors: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether parts with these divisors and weights put together give what the whole gives: the divisors grow with the
    weights, or are alike."""
    ratios = [divisor / weight for divisor, weight in zip(divisors, weights, strict=True) if weight]
    return any(all(math.isclose(v, each[0], rel_tol=_TOLERANCE) for v in each) for each in (divisors, ratios))


class Divisors:
    """Those of each microbatch of a batch. Their values are copied to the host without waiting for a device."""

    def __init__(self, num_microbatches: int) -> None:
        self._values: list[list[Tensor | float]] = [[] for _ in range(num_microbatches)]
        self._copied: torch.cuda.Event | None = None

    def note(self, microbatch: int, loss: Tensor) -> None:
        """Take the divisors of the loss of ``microbatch``, before its backward."""
        self._values[microbatch] = [
            value.detach().to("cpu", non_blocking=True) if isinstance(value, Tensor) else value
            for value in divisors_of(loss)
        ]
        if loss.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def unshared(self, weights: Sequence[float], checked: Sequence[bool]) -> tuple[float, ...]:
        """The divisors of all microbatches of the first term whose share in the batch is not its weight; empty if there is none.

        Args:
            checked: which terms to look at; other losses than those with so many terms are not looked at.
        """
        if any(len(values) != len(checked) for values in self._values):
            return ()
        if self._copied is not None:
            self._copied.synchronize()
        for looks, *values in zip(checked, *self._values, strict=True):
            found = tuple(float(value) for value in values)
            if looks and not are_shares(found, weights):
                return found
        return ()
