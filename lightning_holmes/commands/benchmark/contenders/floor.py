"""The floor: every process trains the whole model on its part of the batch, and nobody communicates.

No way of training on these hosts computes less, and none waits less.
"""

from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job


def make_strategy(job: Job) -> Strategy:
    """Plain Lightning on one device."""
    return SingleDeviceStrategy(device="cpu")


FLOOR = Contender(name="floor", title="no communication (the floor)", make_strategy=make_strategy, alone=True)
