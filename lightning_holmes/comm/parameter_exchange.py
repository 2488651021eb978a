"""ParameterExchange: who holds a stage's parameters and gradients, and how a step brings the first and takes the second.

The schedule says when (FETCH, RELEASE, REDUCE_GRADIENTS), an exchange says how. The runner calls it for every such action
and at no other time. Implementations are optim/exchange.py's, and :class:`LocalExchange` where one process has it all.
"""

from typing import Protocol

from torch import Tensor, nn

from lightning_holmes.comm.queue import Work


class ParameterExchange(Protocol):
    """One object serves a run; every rank of the stage's replicas makes the same calls in the same order."""

    def fetch(self, stage: int) -> Work | None:
        """Start to bring the parameters of ``stage``. The stage's first computation waits for what is returned; None: they
        are here, or whoever reads one waits for it."""

    def release(self, stage: int) -> None:
        """The parameters of ``stage`` may go: nothing computes with them before the next fetch."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """A backward through ``stage`` begins that makes gradients of its parameters: the batch's ``first`` one, its ``last``,
        or one between. No other stage's runs between the last one and ``reduce(stage)``: what it has finished may be reduced
        while it goes on."""

    def reduce(self, stage: int) -> None:
        """All microbatches of ``stage`` are done: start to take its gradients to whoever owns them."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of parameter ``name`` from a split backward, which autograd does not accumulate."""


class LocalExchange:
    """All of ``module`` is in this process, and its gradients stay in ``p.grad``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def fetch(self, stage: int) -> None:
        """Nothing: parameters are here."""

    def release(self, stage: int) -> None:
        """Nothing: they stay."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Nothing: gradients go to ``p.grad``, and no one else has any."""

    def reduce(self, stage: int) -> None:
        """Nothing, likewise."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate into ``p.grad`` as autograd does."""
        parameter = self._module.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
