"""The ranks of a pipeline in this process, for a module that is attached to a trainer."""

from typing import Any

from lightning_holmes.checking.simulated_pipeline import _SimulatedPipeline as SimulatedPipeline
from lightning_holmes.checking.simulated_pipeline import _structure
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.partition import make_partition


def structure_of(module: Any, batch: Any) -> ModuleStructure:
    return _structure({"training_step": module}, batch, "auto", BatchSplitter())


def simulated(module, batch, size: int, schedule: str, chunks: int, partition="uniform") -> SimulatedPipeline:
    structure = structure_of(module, batch)
    stages = make_partition(partition, structure.num_layers, size * chunks)
    return SimulatedPipeline(module, structure, stages, size, schedule, chunks, BatchSplitter())
