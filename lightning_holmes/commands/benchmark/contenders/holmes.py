"""HolmesStrategy with nothing else said, on the network as it is, and with fast links everywhere."""

from lightning.pytorch.strategies import Strategy

from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job
from lightning_holmes.strategy import HolmesStrategy


def make_strategy(job: Job) -> Strategy:
    """As users write it; it is not told what the job knows."""
    return HolmesStrategy()


HOLMES = Contender(name="holmes", title="Holmes", make_strategy=make_strategy, gloo_on_ethernet=False)
HOLMES_FAST = Contender(
    name="holmes-fast",
    title="Holmes, fast links everywhere",
    make_strategy=make_strategy,
    gloo_on_ethernet=False,
    fast_everywhere=True,
)
