"""The request to run a step, and its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.pipeline.replay import LogCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A step to run: its name, batch and further arguments, and how to run it.

    Random numbers depend on ``seed``, the same on all replicas, and on the index of a microbatch among those of all
    replicas, counted from ``replica`` 0. So a microbatch draws the same numbers however the batch of all replicas is
    split.

    ``divisors``: for each number by which the loss divides, whether microbatches must have their shares of it, as in the first batch;
    a batch where they have not is refused (``refuses``), or a warning says so.

    ``loss_scales`` (training) is called on the last stage with the microbatches' weights when the batch has been
    split. It returns a function that is called at the first backward and returns the factors of the microbatches'
    losses.
    ``may_skip``: a step that returns None has no backward, as in Lightning on one process.
    ``exchange`` fetches parameters and takes gradients; None: all parameters are here, and gradients stay in
    ``p.grad``.
    ``is_last``: this rank's loader has no batch after this one.
    ``broadcasts``: the batch of the replica's first rank replaces those of the others; else they are compared.
    ``fixes_options``: the step may not change the optimizer's options, with which parameters are updated before it has ended.
    ``merges``: by the name of a logged value, how the microbatches' values are put together (replay.MERGES); others by their ``reduce_fx``.
    """

    step_name: str
    batch: Any
    arguments: tuple[Any, ...]
    num_microbatches: int
    seed: int
    context: Callable[[], Any]
    replica: int = 0
    is_last: bool = False
    broadcasts: bool = False
    fixes_options: bool = False
    merges: Mapping[str, str] = field(default_factory=dict)
    divisors: Sequence[bool] = ()
    refuses: bool = False
    loss_scales: Callable[[Sequence[float]], Callable[[], Sequence[float | Tensor]]] | None = None
    may_skip: bool = False
    exchange: ParameterExchange | None = None

    @property
    def trains(self) -> bool:
        """Whether the step has a backward."""
        return self.loss_scales is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a whole batch, on every rank of the pipeline: the step's output and its merged log calls."""

    output: Any
    calls: Sequence[LogCall]
