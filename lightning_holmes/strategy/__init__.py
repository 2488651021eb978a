"""Lightning's side: the strategy, what a job and a run consist of, and what they refuse."""

from lightning_holmes.strategy.strategy import HolmesStrategy

__all__ = ["HolmesStrategy"]
