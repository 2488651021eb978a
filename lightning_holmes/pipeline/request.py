"""What a step is asked to do, the batch as its microbatches, and what comes of it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.pipeline.observer import UNOBSERVED, StepObserver
from lightning_holmes.pipeline.replay import LogCall
from lightning_holmes.pipeline.stage import StageRun
from lightning_holmes.plan.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What to run: the step, its batch and further arguments, and how.

    Random numbers come from ``seed``, the same on all replicas, and the place of a microbatch among those of all replicas:
    first those of ``replica`` 0. So a microbatch draws alike however a batch of all replicas is split.

    ``loss_scales`` (training) is called on the last stage with the microbatches' weights when the batch is split; what it
    returns gives, by the first backward, what their losses are multiplied by.
    ``may_skip``: a step that returns None has no backward, as in Lightning on one process.
    ``exchange`` brings parameters and takes gradients; None: all is here, and gradients stay in ``p.grad``.
    ``is_last``: this rank's loader has no batch after this one.
    """

    step_name: str
    batch: Any
    arguments: tuple[Any, ...]
    num_microbatches: int
    seed: int
    context: Callable[[], Any]
    replica: int = 0
    is_last: bool = False
    loss_scales: Callable[[Sequence[float]], Callable[[], Sequence[float | Tensor]]] | None = None
    may_skip: bool = False
    exchange: ParameterExchange | None = None
    observer: StepObserver = UNOBSERVED

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.loss_scales is not None


@dataclass(slots=True, kw_only=True)
class Microbatches:
    """A request's batch on one rank, split.

    ``step(run, microbatch)`` calls the user's step; ``scales()`` gives, on the last stage, what each microbatch's loss is
    multiplied by for the backward; ``seeds`` are theirs (None: leave the generators alone); ``signatures`` tell those of
    different shapes apart; ``after_forwards()`` is called when this rank has run its last forward, while backwards go on.
    ``outputs`` is filled on the rank of the last stage.
    """

    schedule: Schedule
    step: Callable[[StageRun, int], Any]
    signatures: Sequence[Hashable]
    seeds: Sequence[int] | None = None
    scales: Callable[[], Sequence[float | Tensor]] | None = None
    after_forwards: Callable[[], None] | None = None
    outputs: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a whole batch gave, on every rank of the pipeline: the step's output and its merged log calls."""

    output: Any
    calls: Sequence[LogCall]
