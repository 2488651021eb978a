"""RunShape: parallel sizes, devices of each rank, schedule and microbatches: the input of a prediction. Plain data.

layout = Layout(pipeline=2, tensor=1, data=16)
run = RunShape(layout=layout, schedule="1f1b", num_microbatches=8, microbatch_samples=4)
run.make_schedule()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.layer_cost import check_count
from lightning_holmes.plan.schedule import Schedule, make_schedule

Across = Literal["pipeline", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes, and the axis that crosses clusters.

    across="pipeline": pipeline rank s has the devices [s*N/p, (s+1)*N/p) in the order of the topology (Holmes).
    across="data": replica d has the devices [d*N/D, (d+1)*N/D), so that each pipeline stays together. Devices of
    a tensor-parallel group are neighbours in both. grid: the devices of each pipeline rank, tensor group by tensor group, if
    the placement is given; it overrides ``across``.
    """

    pipeline: int
    tensor: int = 1
    data: int = 1
    across: Across = "pipeline"
    grid: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "data"):
            check_count(getattr(self, name), name)
        if self.across not in get_args(Across):
            raise ConfigurationError(f'across={self.across!r} is not known; write "pipeline" or "data"')

    @property
    def num_devices(self) -> int:
        """The number of devices of the layout."""
        return self.pipeline * self.tensor * self.data

    def devices_of(self, pipeline_rank: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """(data, tensor) devices that hold a pipeline rank's stages, numbered in the order of the topology."""
        if self.grid is not None:
            return np.asarray(self.grid[pipeline_rank]).reshape(self.data, self.tensor)
        if self.across == "pipeline":
            each = self.data * self.tensor
            return np.arange(pipeline_rank * each, (pipeline_rank + 1) * each).reshape(self.data, self.tensor)
        first = pipeline_rank * self.tensor
        starts = np.arange(self.data)[:, None] * (self.pipeline * self.tensor) + first
        return starts + np.arange(self.tensor)[None, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A layout with its schedule, microbatches and recomputation."""

    layout: Layout
    schedule: str
    num_microbatches: int
    microbatch_samples: int
    num_chunks: int = 1
    recomputation: bool = False

    def make_schedule(self) -> Schedule:
        """The actions of all pipeline ranks."""
        return make_schedule(
            self.schedule,
            pipeline_parallel_size=self.layout.pipeline,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
        )

    def __str__(self) -> str:
        layout = self.layout
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        again = ", recomputation" if self.recomputation else ""
        crossing = ", data across clusters" if layout.across == "data" and layout.data > 1 < layout.pipeline else ""
        return (
            f"pipeline {layout.pipeline} x tensor {layout.tensor} x data {layout.data}, {self.schedule}{chunks}, "
            f"{self.num_microbatches} microbatches of {self.microbatch_samples}{again}{crossing}"
        )
