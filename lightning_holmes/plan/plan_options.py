"""PlanOptions: the strategy's arguments that a plan depends on. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan
from lightning_holmes.plan.schedule import spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The strategy's arguments that a plan depends on. partition: the name of a rule, or layer counts."""

    pipeline_parallel_size: int | Literal["auto"]
    num_microbatches: int | Literal["auto"]
    eval_num_microbatches: int | Literal["auto"]
    schedule: str
    num_chunks: int | Literal["auto"]
    partition: str | Sequence[int]
    layers: str
    tensor_parallel_size: int = 1

    @property
    def leaves_open(self) -> bool:
        """Whether something is left to decide from costs: the partition, the number of microbatches or the schedule."""
        rule = isinstance(self.partition, str) and self.partition != "uniform"
        return rule or self.num_microbatches == "auto" or (self.schedule == "auto" and self.num_chunks in ("auto", 1))

    @property
    def largest_num_chunks(self) -> int:
        """The number of chunks per rank for which pipeline ranks must be connected; 2 stands for any number above 1."""
        if self.num_chunks != "auto":
            return self.num_chunks
        return 2 if self.schedule == "auto" or spec_of(self.schedule).is_chunked else 1

    @property
    def is_layered(self) -> bool:
        """Whether the given schedule is layered: all microbatches pass one stage of a rank before they begin the next."""
        return self.schedule != "auto" and spec_of(self.schedule).is_layered

    @property
    def placing_schedule(self) -> str:
        """A schedule that places stages on ranks as the run's schedule will: "auto" never chooses a V-shaped schedule."""
        return "interleaved_1f1b" if self.schedule == "auto" else self.schedule

    def chunks_of_counts(self, pipeline_parallel_size: int) -> int | None:
        """The number of chunks implied by a list of layer counts; None if a rule assigns the layers, or num_chunks is given."""
        if isinstance(self.partition, str) or self.num_chunks != "auto":
            return None
        return max(1, len(self.partition) // pipeline_parallel_size)


LEFT_OPEN = PlanOptions(
    pipeline_parallel_size="auto",
    num_microbatches="auto",
    eval_num_microbatches="auto",
    schedule="auto",
    num_chunks="auto",
    partition="self_adapting",
    layers="auto",
)
"""The strategy's defaults."""


def options_of_plan(plan: Plan, given: PlanOptions, *, source: str) -> PlanOptions:
    """The options that reproduce a saved plan.

    Args:
        given: the user's options, which must be the defaults.
        source: the plan's file, for messages.

    Raises:
        ConfigurationError: the user gave an option that the plan already decides.
    """
    asked = {
        entry.name: getattr(given, entry.name)
        for entry in fields(PlanOptions)
        if getattr(given, entry.name) != getattr(LEFT_OPEN, entry.name)
    }
    if asked:
        shown = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise ConfigurationError(f"plan={source!r} decides the layout, so leave out {shown}; or leave out the plan")
    whole = plan.layers == WHOLE_MODULE
    return PlanOptions(
        pipeline_parallel_size=plan.pipeline_parallel_size,
        num_microbatches=plan.num_microbatches,
        eval_num_microbatches=plan.eval_num_microbatches,
        schedule=plan.schedule,
        num_chunks=plan.num_chunks,
        partition="uniform" if whole else list(plan.partition.layer_counts),
        layers="auto" if whole else plan.layers,
        tensor_parallel_size=plan.tensor_parallel_size,
    )
