"""Callbacks for any strategy: throughput, a summary of the run, samples of text, and the timeline of a step."""

from lightning_holmes.callbacks.run_report import (
    ModuleStateSync,
    RunSummary,
    SampleText,
    Throughput,
    count_batch,
    data_parallel_size,
    logger_folder,
)
from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor

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
