"""Asked: the strategy's arguments that a plan depends on. Plain data. What a plan file decides in their place: saved_plan.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_holmes.plan.schedule import spec_of

AskedSharding = Literal["auto", "none", "optimizer", "parameters"]
SHARDINGS: tuple[AskedSharding, ...] = get_args(AskedSharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """HolmesStrategy's arguments of the same names, which it has checked; the defaults are the strategy's.

    partition: the name of a rule, or layer counts. gradient_sync: a name for all pipeline ranks or, by a plan file, one for each.
    """

    pipeline_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int = 1
    num_microbatches: int | Literal["auto"] = "auto"
    eval_num_microbatches: int | Literal["auto"] = "auto"
    schedule: str = "auto"
    num_chunks: int | Literal["auto"] = "auto"
    partition: str | Sequence[int] = "self_adapting"
    layers: str = "auto"
    sharding: AskedSharding = "auto"
    gradient_sync: str | tuple[str, ...] = "auto"
    optimizer_nodes: int = 0
    master_weights: bool = False
    compression: str | None = None

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
