"""ParameterExchange: brings a stage's parameters to the ranks that compute with them, and its gradients to the ranks that own them.

The schedule says when (FETCH, RELEASE, REDUCE_GRADIENTS), an exchange says how. The runner calls it for every such
action, and for backwards. The exchanges share parameters, gradients and optimizer states among replicas in different ways:

exchange                      parameters              unshard, reshard   reduce              states
LocalReducer                  on the one replica      nothing            nothing             there
BucketReducer                 on every replica        nothing            sum over replicas   on every replica
BucketReducer, with a         on every replica        nothing (the step  reduce-scatter      1/dp (ZeRO stage 1, arXiv 1910.02054)
ShardedHost                                           gathers them)
LayeredReducer                1/dp, and two stages    all-gather; free   reduce-scatter      1/dp (arXiv 2106.02679)
StageShards                   likewise                likewise           nothing is trained  none
RemoteReducer                 on optimizer nodes      pull; free         push                on the nodes (LuWu, arXiv 2409.00918)
LocalExchange                 in one process          nothing            nothing             there
"""

from torch import Tensor, nn

from lightning_holmes.comm.queue import Work


class ParameterExchange:
    """The exchange of one run. Every rank of a stage's replicas must make the same calls in the same order. Here each does nothing: the
    parameters are here, and stay."""

    def unshard(self, stage: int) -> Work | None:
        """Start to fetch the parameters of ``stage``. The stage's first computation waits for the work that is
        returned; None: the parameters are here, or the code that reads one waits for it."""
        return None

    def reshard(self, stage: int) -> None:
        """Let go of the parameters of ``stage``: nothing computes with them before the next fetch."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Note that a backward through ``stage`` begins that computes gradients of its parameters; ``first``, ``last``:
        it is the batch's first or last one. No other stage's backward runs between the last one and ``reduce(stage)``,
        so gradients that it has finished may be reduced while it runs."""

    def backward_ended(self, stage: int) -> None:
        """Note that the last backward through ``stage`` has ended; what it hands on has not been sent yet."""

    def reduce(self, stage: int) -> None:
        """Start to bring the gradients of ``stage`` to the ranks that own them: all its microbatches are done."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of parameter ``name`` from a split backward, which autograd does not accumulate."""
        raise AssertionError(f"a split backward of {name} under a schedule that frees stages")


class LocalExchange(ParameterExchange):
    """An exchange for one process that has all of ``module``; gradients stay in ``p.grad``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate into ``p.grad`` as autograd does."""
        parameter = self._module.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
