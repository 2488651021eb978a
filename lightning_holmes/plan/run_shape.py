"""RunShape: parallel sizes, devices of each rank, schedule and microbatches: the input of a prediction. Plain data.

layout = Layout(pipeline=2, tensor=1, data=16)
run = RunShape(layout=layout, schedule="1f1b", num_microbatches=8, microbatch_samples=4)
run.make_schedule()
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_holmes.plan.schedule import Schedule, make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes. Pipeline rank s has the devices [s*N/p, (s+1)*N/p) in the order of the topology (Holmes), or those that ``grid`` gives
    each pipeline rank, tensor group by tensor group, if the placement is given. Devices of a tensor-parallel group are neighbours.
    """

    pipeline: int
    tensor: int = 1
    data: int = 1
    grid: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_devices(self) -> int:
        """The number of devices of the layout."""
        return self.pipeline * self.tensor * self.data

    def devices_of(self, pipeline_rank: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """(data, tensor) devices that hold a pipeline rank's stages, numbered in the order of the topology."""
        if self.grid is not None:
            return np.asarray(self.grid[pipeline_rank]).reshape(self.data, self.tensor)
        each = self.data * self.tensor
        return np.arange(pipeline_rank * each, (pipeline_rank + 1) * each).reshape(self.data, self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A layout with its schedule and microbatches."""

    layout: Layout
    schedule: str
    num_microbatches: int
    microbatch_samples: int
    num_chunks: int = 1

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
        return (
            f"pipeline {layout.pipeline} x tensor {layout.tensor} x data {layout.data}, {self.schedule}{chunks}, "
            f"{self.num_microbatches} microbatches of {self.microbatch_samples}"
        )
