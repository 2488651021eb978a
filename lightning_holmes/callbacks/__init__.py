"""Callbacks for any strategy: throughput, a summary of the run, samples of text, and the timeline of a step."""

from lightning_holmes.callbacks.timeline import TimelineMonitor
from lightning_holmes.callbacks.training import (
    ModuleStateSync,
    RunSummary,
    SampleText,
    Throughput,
    count_batch,
    data_parallel_size,
    logger_folder,
)

__all__ = [
    "ModuleStateSync",
    "RunSummary",
    "SampleText",
    "Throughput",
    "TimelineMonitor",
    "count_batch",
    "data_parallel_size",
    "logger_folder",
]
