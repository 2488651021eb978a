"""The contenders of the benchmark, a file each, in the order of the report.

contender = CONTENDERS["ddp"]
strategy = contender.make_strategy(job)
"""

from lightning_holmes.commands.benchmark.contenders.blind import BLIND
from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job
from lightning_holmes.commands.benchmark.contenders.ddp import DDP, DDP_FP16
from lightning_holmes.commands.benchmark.contenders.floor import FLOOR
from lightning_holmes.commands.benchmark.contenders.fsdp import FSDP
from lightning_holmes.commands.benchmark.contenders.holmes import HOLMES, HOLMES_FAST

CONTENDERS: dict[str, Contender] = {
    contender.name: contender for contender in (FLOOR, DDP, DDP_FP16, FSDP, BLIND, HOLMES, HOLMES_FAST)
}

__all__ = ["CONTENDERS", "Contender", "Job"]
