"""The Lightning strategy: HolmesStrategy, the job and the runs behind it, and the checks of what they support."""

from lightning_holmes.strategy.strategy import HolmesStrategy

__all__ = ["HolmesStrategy"]
