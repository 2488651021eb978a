"""Lightning's DDP, with gradients as they are and with gradients rounded to fp16 for the way."""

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job


def make_ddp(job: Job) -> Strategy:
    """As users write it."""
    return DDPStrategy(process_group_backend="gloo")


def make_ddp_fp16(job: Job) -> Strategy:
    """With torch's hook that halves the bytes of an all-reduce."""
    return DDPStrategy(process_group_backend="gloo", ddp_comm_hook=default_hooks.fp16_compress_hook)


DDP = Contender(name="ddp", title="DDP", make_strategy=make_ddp)
DDP_FP16 = Contender(name="ddp-fp16", title="DDP, fp16 gradients", make_strategy=make_ddp_fp16)
