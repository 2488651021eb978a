"""Callbacks: the timeline of a step."""

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor

__all__ = ["TimelineMonitor"]
