"""Callbacks: the timeline of a step."""

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor

__all__ = ["TimelineMonitor"]


def __getattr__(name: str) -> object:
    if name in ("Throughput", "RunSummary", "SampleText"):
        raise AttributeError(
            f"lightning_holmes.callbacks.{name} is gone: it is recipes.callbacks.{name} in the repository, of which you can copy it"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
